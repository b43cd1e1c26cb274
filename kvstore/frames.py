"""The records of a pool's blocks: reference counts and the free list."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import OutOfBlocks
from kvstore.types import BlockId

Ids = NDArray[np.int32]


class Frames:
    """A fixed set of blocks, each free, cached or held.

    - held: at least one reference
    - cached: no reference, but findable by its prefix
    - free: no reference and not findable

    One array per field and one call per batch of blocks: the time of a call grows with
    its batch, not with the pool. Not thread-safe: one event loop owns them.
    Invariant at every return: num_free + num_cached + num_held == num_blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_cached = 0
        self.ref_counts = np.zeros(num_blocks, np.int32)
        # Changes whenever a block may begin to hold something else, so that whoever
        # remembers a block can tell.
        self.generations = np.zeros(num_blocks, np.int64)
        self.findable = np.zeros(num_blocks, np.bool_)
        # Lowest id on top. The block released last is taken first: it is in the CPU's cache.
        self._free: Ids = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self.num_free = num_blocks

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free - self.num_cached

    def take(self, num_blocks: int) -> Ids:
        """Hold `num_blocks` free blocks.

        Raises:
            OutOfBlocks: too few are free. Nothing changed.
        """
        if num_blocks > self.num_free:
            raise OutOfBlocks(needed=num_blocks, free=self.num_free)
        first = self.num_free - num_blocks
        taken = self._free[first : self.num_free][::-1].copy()
        self.num_free = first
        self.ref_counts[taken] = 1
        self.generations[taken] += 1
        return taken

    def hold(self, block_ids: Ids) -> None:
        """Add a reference to each of these blocks, which are distinct.

        Raises:
            ValueError: one of them is free. Nothing changed.
        """
        counts = self.ref_counts[block_ids]
        unheld = block_ids[counts == 0]
        if not self.findable[unheld].all():
            raise ValueError("a free block holds nothing to refer to")
        self.num_cached -= len(unheld)
        self.ref_counts[block_ids] = counts + 1

    def release(self, block_ids: Ids) -> Ids:
        """Drop a reference of each of these blocks, which are distinct.

        The last one makes a block cached if it is findable, else free; those at the end
        of `block_ids` are taken again first. Returns those that are cached now.

        Raises:
            ValueError: nobody holds one of them. Nothing changed.
        """
        counts = self.ref_counts[block_ids] - 1
        if (counts < 0).any():
            raise ValueError("a block is not held")
        self.ref_counts[block_ids] = counts
        unheld = block_ids[counts == 0]
        kept = self.findable[unheld]
        cached: Ids = unheld[kept]
        self.num_cached += len(cached)
        self._give_back(unheld[~kept])
        return cached

    def set_findable(self, block_ids: Ids) -> None:
        """Keep these held blocks, when released, for those who search their prefix.

        Raises:
            ValueError: nobody holds one of them. Nothing changed.
        """
        if not self.ref_counts[block_ids].all():
            raise ValueError("a block is not held")
        self.findable[block_ids] = True

    def forget(self, block_ids: Ids) -> int:
        """These findable blocks no longer are. How many were cached and are free now."""
        self.findable[block_ids] = False
        unheld = block_ids[self.ref_counts[block_ids] == 0]
        self.num_cached -= len(unheld)
        self._give_back(unheld)
        return len(unheld)

    def is_held(self, block_id: BlockId) -> bool:
        return bool(self.ref_counts[block_id])

    def count_unheld(self, block_ids: Ids) -> int:
        return len(block_ids) - int(np.count_nonzero(self.ref_counts[block_ids]))

    def free_list(self) -> list[BlockId]:
        """The free blocks. For audits."""
        ids: list[BlockId] = self._free[: self.num_free].tolist()
        return ids

    def cached_list(self) -> list[BlockId]:
        """The cached blocks, as their records say. For audits."""
        cached: Any = np.flatnonzero(self.findable & (self.ref_counts == 0))
        ids: list[BlockId] = cached.tolist()
        return ids

    def _give_back(self, block_ids: Ids) -> None:
        end = self.num_free + len(block_ids)
        self._free[self.num_free : end] = block_ids
        self.num_free = end
