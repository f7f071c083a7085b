"""PyTorch's CUDA caching allocator as plain Python: which blocks and segments a sequence of sizes takes.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (torch 2.1 to 2.13; read at
https://github.com/pytorch/pytorch/blob/main/c10/cuda/CUDACachingAllocator.cpp) in their default settings:
``roundup_power2_divisions`` and ``garbage_collection_threshold`` are not modelled, nor are private pools of
CUDA graphs and the delay of blocks that another stream used (``record_stream``). ROCm runs the same source.

Addresses are made up. The driver's are not known in advance; mostly each new segment lies below the last one,
which matters where two free blocks of the same size compete (the lower address wins).
"""

from __future__ import annotations

from bisect import bisect_left, insort

from memfit.devices.allocators.blocks import (
    ADDRESS,
    LARGE_SEGMENT,
    SHIFT,
    SMALL_SEGMENT,
    SMALL_SIZE,
    Block,
    Pool,
    segment_size,
)
from memfit.devices.allocators.space import OutOfSpace

_MIDDLE = 1 << 46  # new segments lie below, adopted ones above
_EXPANDABLE_SPAN = 1 << 41  # address space of one expandable segment; more than any device holds


class CachingAllocator:
    """One process's caching allocator on one device; see :class:`memfit.devices.allocators.space.Allocator`.

    Args:
        capacity_bytes: what the driver can give to this process (capacity less context); ``None``: no limit.
        max_split_size: ``max_split_size_mb`` in bytes; ``None`` is PyTorch's default (no limit).
        expandable_segments: as in ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``.
    """

    def __init__(
        self,
        capacity_bytes: int | None,
        max_split_size: int | None = None,
        expandable_segments: bool = False,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.max_split_size = max_split_size
        self.expandable_segments = expandable_segments
        self.requested = self.allocated = self.reserved = 0
        self.peak_requested = self.peak_allocated = self.peak_reserved = 0
        self.retries = 0
        """How often the cache was given back because the driver had no more (``num_alloc_retries``)."""
        self._blocks: dict[int, Block] = {}
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._next_below = _MIDDLE
        self._next_above = _MIDDLE

    # ------------------------------------------------------------------ what callers use

    def malloc(self, size: int, stream: int = 0) -> int:
        if size <= 0:
            return 0
        rounded = (size + 511) & -512
        pool = self._pool(stream, rounded <= SMALL_SIZE)
        keys = pool.keys
        at = bisect_left(keys, rounded << SHIFT)
        block = None
        if at < len(keys):
            if self.max_split_size is None and not self.expandable_segments:
                block = self._blocks[keys.pop(at) & ADDRESS]
            else:
                block = self._choose(pool, at, rounded)
        if block is None:
            block = self._grow(pool, rounded, size)
        rest = block.size - rounded
        if rest >= pool.least_rest and (
            pool.small
            or self.max_split_size is None
            or self.expandable_segments
            or rounded < self.max_split_size
        ):
            self._split(block, rounded)
            insort(keys, rest << SHIFT | (block.address + rounded))
        block.in_use = True
        block.requested = size
        self.requested += size
        self.allocated += block.size
        if self.requested > self.peak_requested:
            self.peak_requested = self.requested
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return block.address

    def free(self, handle: int) -> None:
        if handle == 0:
            return
        block = self._blocks.get(handle)
        if block is None or not block.in_use:
            raise ValueError(f"handle {handle:#x} is not live")
        block.in_use = False
        self.requested -= block.requested
        self.allocated -= block.size
        self._merge(block)

    def block_size(self, handle: int) -> int:
        """Bytes of the block behind a live handle (the ``size`` that a memory snapshot shows)."""
        return self._blocks[handle].size

    def empty_cache(self) -> None:
        """Give every whole free segment (or granule of an expandable one) back to the driver."""
        for pool in self._pools.values():
            free = [self._blocks[key & ADDRESS] for key in pool.keys]
            for block in free:
                if self.expandable_segments:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    self._release(block)

    @property
    def inactive_split(self) -> int:
        """Bytes of free blocks with a neighbour in their segment: what ``empty_cache`` cannot give back."""
        return sum(
            block.size
            for block in self._blocks.values()
            if not block.in_use and block.mapped and (block.before is not None or block.after is not None)
        )

    def adopt_segment(self, size: int, blocks: list[tuple[int, int, int]], stream: int = 0) -> list[int]:
        """Start from a segment that exists already (a snapshot's first state); segments in ascending address.

        Args:
            size: of the segment, bytes.
            blocks: those in use, as (offset, block size, requested size); what lies between is free.
            stream: that the segment belongs to.

        Returns:
            The handles, in the order of ``blocks``.
        """
        pool = self._pool(stream, size <= SMALL_SEGMENT)
        base, self._next_above = self._next_above, self._next_above + size
        whole = self._segment(base, size, pool)
        at = whole
        for offset, block_size, requested in sorted(blocks):
            if base + offset > at.address:
                rest = self._split(at, base + offset - at.address)
                pool.add(at)
                at = rest
            rest_of = self._split(at, block_size) if at.size > block_size else None
            at.in_use, at.requested = True, requested
            self.requested += requested
            self.allocated += at.size
            if rest_of is not None:
                at = rest_of
        if not at.in_use:
            pool.add(at)
        self.peak_requested = max(self.peak_requested, self.requested)
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return [base + offset for offset, _, _ in blocks]

    # ------------------------------------------------------------------ blocks

    def _pool(self, stream: int, small: bool) -> Pool:
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = Pool(stream, small, self.expandable_segments)
        return pool

    def _split(self, block: Block, size: int) -> Block:
        """Cut ``block`` to ``size``; the rest is a new free block, in no pool yet."""
        rest = Block(block.address + size, block.size - size, block.pool)
        rest.mapped = block.mapped
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after = rest
        block.size = size
        self._blocks[rest.address] = rest
        return rest

    def _merge(self, block: Block) -> Block:
        """Join a free block, in no pool, with its free neighbours, and put the whole into the pool."""
        pool = block.pool
        after = block.after
        if after is not None and after.mapped and not after.in_use:
            pool.remove(after)
            self._swallow(block, after)
        before = block.before
        if before is not None and before.mapped and not before.in_use:
            pool.remove(before)
            self._swallow(before, block)
            block = before
        insort(pool.keys, block.size << SHIFT | block.address)
        return block

    def _swallow(self, block: Block, after: Block) -> None:
        block.size += after.size
        block.after = after.after
        if after.after is not None:
            after.after.before = block
        del self._blocks[after.address]

    def _choose(self, pool: Pool, at: int, rounded: int) -> Block | None:
        """``get_free_block`` with its special rules for expandable segments and for ``max_split_size``."""
        keys = pool.keys
        if self.expandable_segments:
            # A block counts with the room into which it can expand, so the tail of the segment comes last.
            room = self._room(keys[at])
            while at + 1 < len(keys) and (next_room := self._room(keys[at + 1])) < room:
                at, room = at + 1, next_room
        size = keys[at] >> SHIFT
        limit = self.max_split_size
        if limit is not None:
            if rounded < limit <= size:
                return None
            if rounded >= limit and size >= rounded + LARGE_SEGMENT:
                return None
        return self._blocks[keys.pop(at) & ADDRESS]

    def _room(self, key: int) -> int:
        block = self._blocks[key & ADDRESS]
        after = block.after
        return block.size + (after.size if after is not None and not after.mapped else 0)

    # ------------------------------------------------------------------ segments

    def _grow(self, pool: Pool, rounded: int, size: int) -> Block:
        """A block of new memory; where there is none, free what fits, then everything, then give up."""
        block = self._extend(pool, rounded)
        if block is None and self._release_fitting(pool, rounded):
            block = self._extend(pool, rounded)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._extend(pool, rounded)
        if block is None:
            assert self.capacity_bytes is not None
            raise OutOfSpace(size, self.allocated, self.reserved, self.capacity_bytes)
        return block

    def _extend(self, pool: Pool, rounded: int) -> Block | None:
        """A free block, in no pool, of at least ``rounded`` bytes from the driver; None: it has no more."""
        if self.expandable_segments:
            return self._expand(pool, rounded)
        size = segment_size(rounded)
        if not self._has_room(size):
            return None
        self._next_below -= size
        return self._segment(self._next_below, size, pool)

    def _has_room(self, size: int) -> bool:
        return self.capacity_bytes is None or self.reserved + size <= self.capacity_bytes

    def _segment(self, address: int, size: int, pool: Pool) -> Block:
        block = self._blocks[address] = Block(address, size, pool)
        self._reserve(size)
        return block

    def _reserve(self, size: int) -> None:
        self.reserved += size
        if self.reserved > self.peak_reserved:
            self.peak_reserved = self.reserved

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        del self._blocks[block.address]
        self.reserved -= block.size

    def _release_fitting(self, pool: Pool, rounded: int) -> bool:
        """``release_available_cached_blocks``: only oversize blocks, so only with ``max_split_size``."""
        limit = self.max_split_size
        if limit is None or self.expandable_segments:
            return False
        wanted = max(rounded, limit)
        at = bisect_left(pool.keys, wanted << SHIFT)
        if at < len(pool.keys):
            self._release(self._blocks[pool.keys[at] & ADDRESS])
            return True
        released = 0
        while released < wanted and pool.keys and pool.keys[-1] >> SHIFT >= limit:
            block = self._blocks[pool.keys[-1] & ADDRESS]
            released += block.size
            self._release(block)
        return released >= wanted

    # ------------------------------------------------------------------ expandable segments

    def _expand(self, pool: Pool, rounded: int) -> Block | None:
        """``try_allocate_expandable_block``: map granules at the first place with room for ``rounded``."""
        block = self._first_place(pool, rounded)
        if not block.mapped:
            mapped = self._map(block, min(block.size, rounded))
            if mapped is None:
                return None
            block = mapped
        while block.size < rounded:
            after = block.after
            assert after is not None and not after.mapped
            mapped = self._map(after, min(rounded - block.size, after.size))
            if mapped is None:
                return None
            block = mapped
        pool.remove(block)
        return block

    def _first_place(self, pool: Pool, rounded: int) -> Block:
        for address in pool.unmapped:
            block = self._blocks[address]
            if block.before is not None and not block.before.in_use:
                block = block.before
            room, at = 0, block
            while room < rounded and at is not None and not at.in_use:
                room += at.size
                at = at.after  # type: ignore[assignment]
            if room >= rounded:
                return block
        # Granules count from the segment's base, which is therefore a multiple of both of them here.
        self._next_below = (self._next_below - _EXPANDABLE_SPAN) // LARGE_SEGMENT * LARGE_SEGMENT
        block = self._blocks[self._next_below] = Block(self._next_below, _EXPANDABLE_SPAN, pool)
        block.mapped = False
        pool.unmapped.append(block.address)
        pool.unmapped.sort()
        return block

    def _map(self, block: Block, size: int) -> Block | None:
        """Back the first ``size`` bytes of an unmapped block with memory, in whole granules."""
        granule = block.pool.granule
        size = min(block.size, -(-size // granule) * granule)
        if not self._has_room(size):
            return None
        unmapped = block.pool.unmapped
        del unmapped[bisect_left(unmapped, block.address)]
        if size < block.size:
            insort(unmapped, self._split(block, size).address)
        block.mapped = True
        self._reserve(size)
        return self._merge(block)

    def _unmap(self, block: Block) -> None:
        """Give the whole granules inside a free block back (``unmap_block``)."""
        pool = block.pool
        first = -(-block.address // pool.granule) * pool.granule
        last = (block.address + block.size) // pool.granule * pool.granule
        if last <= first:
            return
        pool.remove(block)
        if first > block.address:
            middle = self._split(block, first - block.address)
            pool.add(block)
            block = middle
        if last < block.address + block.size:
            pool.add(self._split(block, last - block.address))
        self.reserved -= block.size
        block.mapped = False
        before, after = block.before, block.after
        if after is not None and not after.mapped:
            pool.unmapped.remove(after.address)
            self._swallow(block, after)
        if before is not None and not before.mapped:
            self._swallow(before, block)
        else:
            insort(pool.unmapped, block.address)
