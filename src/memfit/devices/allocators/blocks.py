"""Sizes, free lists and blocks of the CUDA caching allocator's model (:mod:`memfit.devices.allocators.cuda`).

Constants and roundings are those of ``c10/cuda/CUDACachingAllocator.cpp`` and
``c10/core/CachingDeviceAllocator.h`` (https://github.com/pytorch/pytorch/tree/main/c10).
"""

from __future__ import annotations

from bisect import bisect_left, insort

MIB = 2**20
BLOCK = 512  # kMinBlockSize: every size is rounded to it
SMALL_SIZE = 1 * MIB  # kSmallSize: larger blocks live in the large pool
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT = 20 * MIB  # kLargeBuffer
LARGE_FROM = 10 * MIB  # kMinLargeAlloc: from here a request has a segment of its own size
LARGE_ROUND = 2 * MIB  # kRoundLarge

SHIFT = 48  # a free block's key is size << 48 | address, so that plain integers sort as (size, address)
ADDRESS = (1 << SHIFT) - 1


class Pool:
    """The free blocks of one stream and one size class."""

    __slots__ = ("granule", "keys", "least_rest", "small", "stream", "unmapped")

    def __init__(self, stream: int, small: bool, expandable: bool) -> None:
        self.stream = stream
        self.small = small
        self.keys: list[int] = []
        self.granule = SMALL_SEGMENT if small else LARGE_SEGMENT
        # should_split(): the smallest remainder that becomes a block of its own.
        self.least_rest = BLOCK if small or expandable else SMALL_SIZE + 1
        self.unmapped: list[int] = []  # addresses of an expandable segment's unmapped ranges, ascending

    def add(self, block: Block) -> None:
        insort(self.keys, block.size << SHIFT | block.address)

    def remove(self, block: Block) -> None:
        del self.keys[bisect_left(self.keys, block.size << SHIFT | block.address)]


class Block:
    """A range of a segment: in use, free (cached), or address space without memory (``mapped`` is False)."""

    __slots__ = ("address", "after", "before", "in_use", "mapped", "pool", "requested", "size")

    def __init__(self, address: int, size: int, pool: Pool) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.requested = 0
        self.in_use = False
        self.mapped = True
        self.before: Block | None = None
        self.after: Block | None = None


def round_size(size: int) -> int:
    """The bytes of the block that a request needs (``round_size``)."""
    return max(BLOCK, (size + BLOCK - 1) & -BLOCK)


def segment_size(rounded: int) -> int:
    """The bytes that are asked of the driver for a rounded request (``get_allocation_size``)."""
    if rounded <= SMALL_SIZE:
        return SMALL_SEGMENT
    if rounded < LARGE_FROM:
        return LARGE_SEGMENT
    return (rounded + LARGE_ROUND - 1) & -LARGE_ROUND
