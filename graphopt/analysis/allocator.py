"""PyTorch's CUDA caching allocator as a model: from what a step allocates to what it reserves, without a GPU.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` with default settings: sizes are rounded up to 512 bytes; up to 1 MiB
comes from segments of 2 MiB, below 10 MiB from segments of 20 MiB, larger requests get segments rounded up to 2 MiB; the best
fitting free block is split, and neighbouring free blocks merge.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from dataclasses import dataclass

from graphopt.analysis.memory import MemoryProfile

MIB = 2**20
ROUNDING = 512
SMALL_REQUEST = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_REQUEST = 10 * MIB
LARGE_SEGMENT = 20 * MIB
SEGMENT_ROUNDING = 2 * MIB

CONTEXT_BYTES = 512 * MIB
"""Default for what the CUDA context takes beside the allocator; 300 to 600 MiB depending on driver, GPU and loaded libraries."""


@dataclass(frozen=True)
class CudaMemory:
    """Bytes on a CUDA device.

    Attributes:
        exact_bytes: the plain sum of live tensors at its peak.
        allocated_bytes: the same, each rounded up to 512 bytes (`torch.cuda.max_memory_allocated`).
        reserved_bytes: what the allocator took from the device (`torch.cuda.max_memory_reserved`).
        context_bytes: assumed for the CUDA context.
    """

    exact_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    context_bytes: int

    @property
    def total_bytes(self) -> int:
        """What `nvidia-smi` would show."""
        return self.reserved_bytes + self.context_bytes


def rounded(size: int) -> int:
    """Bytes that a request takes: a multiple of 512, at least 512."""
    return max(ROUNDING, -(-size // ROUNDING) * ROUNDING)


def cuda_memory(profile: MemoryProfile, context_bytes: int = CONTEXT_BYTES) -> CudaMemory:
    """Run a profile's allocations of two steps through the allocator: what the first left fragmented shows in the second."""
    allocator = CachingAllocator()
    end = len(profile.rows) - 1
    born, freed = defaultdict(list), defaultdict(list)
    for i, block in enumerate(profile.blocks):
        if profile.sizes[i] == 0:
            continue
        if block.born == 0 and block.last == end:
            allocator.allocate(profile.sizes[i])
            continue
        born[block.born].append(i)
        freed[block.last].append(i)
    for _ in range(2):
        held: dict[int, Block] = {}
        for row in range(end + 1):
            for i in born[row]:
                held[i] = allocator.allocate(profile.sizes[i])
            for i in freed[row]:
                allocator.free(held.pop(i))
    return CudaMemory(profile.peak_bytes, allocator.peak_allocated, allocator.reserved, context_bytes)


@dataclass(eq=False)
class Block:
    """A piece of a segment; neighbours are linked in address order."""

    address: int
    size: int
    pool: _Pool
    free: bool = False
    before: Block | None = None
    after: Block | None = None


class _Pool:
    """Free blocks of one pool, ordered by size and then address."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self._blocks: list[Block] = []

    def add(self, block: Block) -> None:
        block.free = True
        bisect.insort(self._blocks, block, key=_order)

    def remove(self, block: Block) -> None:
        block.free = False
        del self._blocks[bisect.bisect_left(self._blocks, _order(block), key=_order)]

    def best_fit(self, size: int) -> Block | None:
        position = bisect.bisect_left(self._blocks, (size, -1), key=_order)
        return self._blocks[position] if position < len(self._blocks) else None


def _order(block: Block) -> tuple[int, int]:
    return block.size, block.address


class CachingAllocator:
    """Allocations and frees on one stream; `reserved`, `allocated` and `peak_allocated` are bytes."""

    def __init__(self) -> None:
        self.reserved = self.allocated = self.peak_allocated = 0
        self._pools = {True: _Pool(True), False: _Pool(False)}
        self._next_address = 0

    def allocate(self, size: int) -> Block:
        """A block of at least `size` bytes, from the cache or from a new segment."""
        size = rounded(size)
        pool = self._pools[size <= SMALL_REQUEST]
        block = pool.best_fit(size)
        if block is None:
            block = self._segment(pool, size)
        pool.remove(block)
        remaining = block.size - size
        if remaining >= ROUNDING if pool.small else remaining > SMALL_REQUEST:
            rest = Block(block.address + size, remaining, pool, before=block, after=block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.after, block.size = rest, size
            pool.add(rest)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Give a block back to the cache, merged with free neighbours."""
        pool = block.pool
        self.allocated -= block.size
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                pool.remove(neighbour)
                first, second = sorted((neighbour, block), key=lambda b: b.address)
                first.size += second.size
                first.after = second.after
                if second.after is not None:
                    second.after.before = first
                block = first
        pool.add(block)

    def _segment(self, pool: _Pool, size: int) -> Block:
        if pool.small:
            length = SMALL_SEGMENT
        elif size < LARGE_REQUEST:
            length = LARGE_SEGMENT
        else:
            length = -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING
        self.reserved += length
        block = Block(self._next_address, length, pool)
        self._next_address += length
        pool.add(block)
        return block
