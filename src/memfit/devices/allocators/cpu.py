"""PyTorch's CPU allocations under glibc, with the malloc settings that memfit's runs use.

``MALLOC_MMAP_THRESHOLD_=65536 MALLOC_ARENA_MAX=1`` (a fixed threshold also turns glibc's growing one off)
make memory repeatable: from 64 KiB every tensor is a mapping of its own, which goes back when the tensor
dies; smaller ones come from one heap, which grows and is kept. PyTorch asks ``posix_memalign`` for 64-byte
alignment (https://github.com/pytorch/pytorch/blob/main/c10/core/impl/alloc_cpu.cpp); glibc pads such a
request by the alignment and a smallest chunk, rounds a mapping to pages, and keeps the padding
(``_int_memalign``, ``sysmalloc``:
https://sourceware.org/git/?p=glibc.git;a=blob;f=malloc/malloc.c;hb=glibc-2.36).
"""

from __future__ import annotations

from bisect import bisect_left, insort

from memfit.devices.allocators.space import OutOfSpace

MMAP_THRESHOLD = 65536
MALLOC_SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD),
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}
"""Environment of every process whose memory is measured or was predicted with this model."""

ALIGNMENT = 64  # c10's gAlignment
PAGE = 4096
HEAP_STEP = 132 * 1024  # M_TOP_PAD (128 KiB) and a page: how the heap grows
_HEADER = 8  # SIZE_SZ: what a chunk in use costs beside its bytes
_PADDING = ALIGNMENT + 32  # alignment and MINSIZE: asked for in addition, so that an aligned place is inside
_SHIFT = 48
_ADDRESS = (1 << _SHIFT) - 1


def mapped_size(size: int) -> int:
    """Bytes of the mapping of a request of ``size`` bytes; 0: it is small and comes from the heap."""
    chunk = (((size + _HEADER + 15) & -16) + _PADDING + _HEADER + 15) & -16
    if chunk < MMAP_THRESHOLD:
        return 0
    return (chunk + _HEADER + PAGE - 1) & -PAGE


class CpuAllocator:
    """One process's tensor memory on the CPU; see :class:`memfit.devices.allocators.space.Allocator`.

    ``reserved`` counts mappings and the heap; whole pages, as the kernel does once they have been written.
    The heap's free chunks are chosen best fit; its top is not given back.

    Args:
        capacity_bytes: what the process may hold beside its context; ``None``: no limit.
    """

    def __init__(self, capacity_bytes: int | None) -> None:
        self.capacity_bytes = capacity_bytes
        self.requested = self.allocated = self.reserved = 0
        self.peak_requested = self.peak_allocated = self.peak_reserved = 0
        self._live: dict[int, tuple[int, int]] = {}  # handle -> requested size, bytes taken
        self._next_mapping = 1 << 40
        self._heap_end = self._heap_top = 64  # a handle is never 0
        self._free_keys: list[int] = []  # size << 48 | address
        self._free_at: dict[int, int] = {}  # address -> size of free chunks
        self._free_until: dict[int, int] = {}  # end -> address of free chunks

    def malloc(self, size: int, stream: int = 0) -> int:
        if size <= 0:
            return 0
        taken = mapped_size(size)
        if taken:
            self._reserve(taken, size)
            handle, self._next_mapping = self._next_mapping, self._next_mapping + taken
        else:
            taken = (size + _HEADER + ALIGNMENT - 1) & -ALIGNMENT
            handle = self._from_heap(taken, size)
        self._live[handle] = (size, taken)
        self.requested += size
        self.allocated += taken
        self.peak_requested = max(self.peak_requested, self.requested)
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return handle

    def free(self, handle: int) -> None:
        if handle == 0:
            return
        if handle not in self._live:
            raise ValueError(f"handle {handle:#x} is not live")
        size, taken = self._live.pop(handle)
        self.requested -= size
        self.allocated -= taken
        if handle >= 1 << 40:
            self.reserved -= taken
        else:
            self._to_heap(handle, taken)

    def block_size(self, handle: int) -> int:
        """Bytes taken by a live handle, padding included."""
        return self._live[handle][1]

    def empty_cache(self) -> None:
        """``malloc_trim`` gives free pages back; the model lets the whole heap go once it is empty."""
        if self._heap_end > 64 and self._free_at.get(64) == self._heap_top - 64:
            self.reserved -= self._heap_end - 64
            self._heap_end = self._heap_top = 64
            self._free_keys.clear()
            self._free_at.clear()
            self._free_until.clear()

    @property
    def inactive_split(self) -> int:
        """Bytes of the heap that are free."""
        return sum(self._free_at.values())

    def _reserve(self, taken: int, size: int) -> None:
        if self.capacity_bytes is not None and self.reserved + taken > self.capacity_bytes:
            raise OutOfSpace(size, self.allocated, self.reserved, self.capacity_bytes)
        self.reserved += taken
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _from_heap(self, taken: int, size: int) -> int:
        at = bisect_left(self._free_keys, taken << _SHIFT)
        if at < len(self._free_keys):
            address = self._free_keys[at] & _ADDRESS
            found = self._remove_free(address)
            if found > taken:
                self._add_free(address + taken, found - taken)
            return address
        address, end = self._heap_top, self._heap_top + taken
        if end > self._heap_end:
            step = max(HEAP_STEP, (end - self._heap_end + PAGE - 1) & -PAGE)
            self._reserve(step, size)
            self._heap_end += step
        self._heap_top = end
        return address

    def _to_heap(self, address: int, taken: int) -> None:
        before = self._free_until.get(address)
        if before is not None:
            taken += self._remove_free(before)
            address = before
        if address + taken in self._free_at:
            taken += self._remove_free(address + taken)
        self._add_free(address, taken)

    def _add_free(self, address: int, size: int) -> None:
        insort(self._free_keys, size << _SHIFT | address)
        self._free_at[address] = size
        self._free_until[address + size] = address

    def _remove_free(self, address: int) -> int:
        size = self._free_at.pop(address)
        del self._free_until[address + size]
        del self._free_keys[bisect_left(self._free_keys, size << _SHIFT | address)]
        return size
