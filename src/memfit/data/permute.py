"""A seeded order of 0 … n-1 that is computed, not stored: a Feistel network with cycle walking."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_ROUNDS = 6


class Permutation:
    """A one-to-one order of ``range(size)``, drawn by ``seed``; constant memory whatever the size.

    The network permutes ``range(4 ** half_bits)``, the smallest such range that holds ``size``; an image
    outside ``range(size)`` is sent through again until it falls inside (fewer than four times on average).
    """

    def __init__(self, size: int, seed: str) -> None:
        assert size > 0
        self.size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        digest = hashlib.blake2b(seed.encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]

    def __call__(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The positions' images."""
        import numpy as np

        values = self._network(indices.astype(np.uint64))
        while (outside := values >= np.uint64(self.size)).any():
            values[outside] = self._network(values[outside])
        return values.astype(np.int64)

    def _network(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        import numpy as np

        bits = np.uint64(self._half_bits)
        mask = np.uint64((1 << self._half_bits) - 1)
        left, right = values >> bits, values & mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right, key) & mask)
        return (left << bits) | right


def _mix(values: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014, https://doi.org/10.1145/2660193.2660195)."""
    import numpy as np

    mixed = values + np.uint64(key)  # arrays wrap around without a warning
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
