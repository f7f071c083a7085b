"""Bounded streams: documents from files (``sources``, ``formats``), tokens (``tokenize``, ``store``), batches
(``permute``, ``batches``). Nothing here holds a data set in memory; what grows with the data lies in one
cache file on disk. The entry is :func:`memfit.data.batches.open_stream`.
"""
