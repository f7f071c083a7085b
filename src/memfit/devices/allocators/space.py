"""What every allocator model offers, and the error that it raises when its space is used up."""

from __future__ import annotations

from typing import Any, Protocol

from memfit.core.errors import MemfitError


class OutOfSpace(MemfitError):
    """A simulated allocation found no room, even after the allocator gave its cache back.

    Args:
        requested: bytes asked for by the tensor.
        allocated: bytes in blocks that tensors held at that moment.
        reserved: bytes held by the allocator at that moment.
        capacity: bytes that the allocator may hold.
    """

    exit_status = 1

    def __init__(self, requested: int, allocated: int, reserved: int, capacity: int) -> None:
        super().__init__(
            "device.out_of_space",
            requested=requested,
            allocated=allocated,
            reserved=reserved,
            capacity=capacity,
        )
        self.requested = requested
        self.allocated = allocated
        self.reserved = reserved
        self.capacity = capacity

    def __reduce__(self) -> tuple[Any, ...]:
        return (OutOfSpace, (self.requested, self.allocated, self.reserved, self.capacity))


class Allocator(Protocol):
    """A model of one process's allocator on one device. All attributes are bytes.

    Attributes:
        requested: what the live tensors asked for.
        allocated: the blocks that hold them, rounding and unsplit remainders included.
        reserved: what the allocator holds of the device, its cache included.
        peak_requested, peak_allocated, peak_reserved: the highest value of each so far, each at its own time.
    """

    requested: int
    allocated: int
    reserved: int
    peak_requested: int
    peak_allocated: int
    peak_reserved: int

    def malloc(self, size: int, stream: int = 0) -> int:
        """Take ``size`` bytes; the handle to give to :meth:`free`. Nothing is taken for 0 bytes (handle 0).

        Raises:
            OutOfSpace: there is no room.
        """
        ...

    def free(self, handle: int) -> None:
        """Give a block back; ``ValueError`` for a handle that is not live."""
        ...

    def block_size(self, handle: int) -> int:
        """Bytes of the block behind a live handle."""
        ...

    def empty_cache(self) -> None:
        """Give back to the device what no tensor needs."""
        ...

    @property
    def inactive_split(self) -> int:
        """Bytes that are free but cannot go back, for a neighbour in the same segment is in use."""
        ...
