"""CUDA's caching allocator on a CPU: its memory costs nothing until it is touched, and is handed out as on a GPU.

Sizes are rounded up to ``GRAIN``. The smallest free block that is large enough is taken, and split only if enough is
left over. In use are ::

    used(t) = WORKSPACES WORKSPACE + sum_{blocks out at t} size(block)        peak = max_t used(t)

Matrix products allocate the workspaces for good: one in forward and one in backward, which is another thread on a GPU.
"""

from __future__ import annotations

import bisect
import math
import mmap
import weakref
from dataclasses import dataclass

import torch

GRAIN = 512
"""CUDA's caching allocator hands out multiples of this many bytes."""
SMALL, SMALL_SEGMENT, SEGMENT = 2**20, 2 * 2**20, 20 * 2**20
"""Largest small block, size of the segments of small blocks, and smallest segment of large ones, in bytes."""
WORKSPACE, WORKSPACES = 2**25, 2
"""Bytes of one cuBLAS workspace on compute capability 9 (8.1 MiB on others), and how many there are."""


@dataclass(eq=False)
class _Block:
    """A piece of a memory segment.

    Args:
        size: Its bytes.
        address: Where it begins.
        before: The previous block of its segment.
        after: The next block of its segment.
        free: Whether it is free.
    """

    size: int
    address: int
    before: _Block | None = None
    after: _Block | None = None
    free: bool = True


class _Pool:
    """The segments of one kind; it hands out the smallest free block that is large enough.

    Args:
        least: A block is split if more bytes than these would be left over.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._free: list[tuple[int, int, _Block]] = []
        self._end = 0

    def take(self, size: int, segment: int) -> _Block:
        """Return a block of at least ``size`` bytes, from a new segment of ``segment`` bytes if none is free."""
        place = bisect.bisect_left(self._free, (size, 0))
        if place < len(self._free):
            block = self._free.pop(place)[2]
        else:
            block = _Block(segment, self._end)
            self._end += segment
        if block.size - size > self._least:
            rest = _Block(block.size - size, block.address + size, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.size, block.after = size, rest
            self._add(rest)
        block.free = False
        return block

    def give(self, block: _Block) -> None:
        """Take a block back, and merge it with free neighbours."""
        block.free = True
        before, after = block.before, block.after
        if after is not None and after.free:
            self._remove(after)
            self._join(block, after)
        if before is not None and before.free:
            self._remove(before)
            self._join(before, block)
            block = before
        self._add(block)

    def _join(self, first: _Block, second: _Block) -> None:
        first.size, first.after = first.size + second.size, second.after
        if second.after is not None:
            second.after.before = first

    def _add(self, block: _Block) -> None:
        bisect.insort(self._free, (block.size, block.address, block))

    def _remove(self, block: _Block) -> None:
        del self._free[bisect.bisect_left(self._free, (block.size, block.address))]


class CachingAllocator:
    """Hands out memory that costs nothing until it is touched, and counts bytes as CUDA's caching allocator does.

    Args:
        workspaces: Whether to count cuBLAS's workspaces, which a CPU does not have.
    """

    def __init__(self, workspaces: bool = True) -> None:
        self._used = self._peak = 0
        self._small, self._large = _Pool(GRAIN - 1), _Pool(SMALL)
        self.without_values: set[int] = set()
        """Addresses of storages whose memory holds no values."""
        for _ in range(WORKSPACES if workspaces else 0):
            self._take(WORKSPACE)

    def empty(self, nbytes: int) -> torch.UntypedStorage:
        """Return a storage of ``nbytes`` bytes."""
        if not nbytes:
            return torch.empty(0).untyped_storage()
        memory = mmap.mmap(-1, nbytes)
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        # Watch the memory, not the storage: weak references such as those of recorders keep an empty storage alive.
        weakref.finalize(memory, self._gone, storage._cdata, *self._take(nbytes)).atexit = False
        self.without_values.add(storage._cdata)
        return storage

    def ask(self) -> tuple[int, int]:
        """Return the bytes in use now, and the most since the last call."""
        peak, self._peak = self._peak, self._used
        return self._used, peak

    def _take(self, nbytes: int) -> tuple[_Pool, _Block]:
        size = math.ceil(nbytes / GRAIN) * GRAIN
        if size <= SMALL:
            pool, segment = self._small, SMALL_SEGMENT
        else:
            pool, segment = (
                self._large,
                SEGMENT if size < SEGMENT // 2 else math.ceil(size / SMALL_SEGMENT) * SMALL_SEGMENT,
            )
        block = pool.take(size, segment)
        self._used += block.size
        self._peak = max(self._peak, self._used)
        return pool, block

    def _gone(self, storage: int, pool: _Pool, block: _Block) -> None:
        self._used -= block.size
        pool.give(block)
        self.without_values.discard(storage)
