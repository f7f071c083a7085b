"""Bytes inside, GiB when shown: reading and writing quantities with their units."""

from __future__ import annotations

import re

from memfit.core.errors import BadInput

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
_FACTORS = {
    "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_QUANTITY = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*$")


def parse_bytes(text: str | int, *, key: str = "memory", file: str | None = None) -> int:
    """Bytes from text such as ``"24GiB"`` or ``"512 MiB"``; a plain integer is bytes already.

    Raises:
        BadInput: no number, no unit, an unknown unit, or nothing above zero.
    """
    if isinstance(text, bool) or not isinstance(text, int | str):
        raise BadInput("input.bytes", file=file, setting=key, value=text, choices=", ".join(_FACTORS))
    if isinstance(text, int):
        value = text
    else:
        match = _QUANTITY.match(text)
        if match is None or match[2] not in _FACTORS:
            raise BadInput("input.bytes", file=file, setting=key, value=text, choices=", ".join(_FACTORS))
        value = round(float(match[1]) * _FACTORS[match[2]])
    if value <= 0:
        raise BadInput("input.positive", file=file, setting=key, value=text)
    return value


def gib(size: int | float) -> float:
    """Bytes as GiB (2^30)."""
    return size / GIB


def show_bytes(size: int | float) -> str:
    """Bytes for people: GiB from 0.1 GiB on, MiB and KiB below."""
    sign, size = ("-", -size) if size < 0 else ("", size)
    if size >= 0.1 * GIB:
        return f"{sign}{size / GIB:.2f} GiB"
    if size >= MIB:
        return f"{sign}{size / MIB:.1f} MiB"
    if size >= KIB:
        return f"{sign}{size / KIB:.1f} KiB"
    return f"{sign}{size:.0f} B"


def show_seconds(seconds: float) -> str:
    """Seconds for people: µs, ms, s, min or h."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"
