"""The records of a pool's blocks: reference counts and the free list."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import OutOfBlocks
from kvstore.types import BlockId


class Frames:
    """A fixed set of blocks, each free, cached or held.

    - held: at least one reference
    - cached: no reference, but findable by its prefix; ordered by last use
    - free: no reference and not findable

    Flat lists, no object per block. Not thread-safe: one event loop owns them.
    Invariant at every return: num_free + num_cached + num_held == num_blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_cached = 0
        self.ref_counts = [0] * num_blocks
        # Changes whenever a block leaves the free list, so that whoever remembers a
        # block can tell that it may hold something else by now.
        self.generations = [0] * num_blocks
        self._findable = bytearray(num_blocks)
        # Lowest id on top. The block released last is taken first: it is in the CPU's cache.
        self._free = list(range(num_blocks - 1, -1, -1))
        # Cached blocks as a ring through index num_blocks, oldest after it.
        self._end = num_blocks
        self._newer = [self._end] * (num_blocks + 1)
        self._older = [self._end] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return self.num_blocks - len(self._free) - self.num_cached

    @property
    def oldest_cached(self) -> BlockId | None:
        """The cached block that was used least recently."""
        block_id = self._newer[self._end]
        return None if block_id == self._end else block_id

    def is_cached(self, block_id: BlockId) -> bool:
        return bool(self._findable[block_id]) and not self.ref_counts[block_id]

    def is_findable(self, block_id: BlockId) -> bool:
        return bool(self._findable[block_id])

    def take(self, num_blocks: int) -> list[BlockId]:
        """Hold `num_blocks` free blocks.

        Raises:
            OutOfBlocks: too few are free. Nothing changed.
        """
        if num_blocks > len(self._free):
            raise OutOfBlocks(needed=num_blocks, free=len(self._free))
        taken = [self._free.pop() for _ in range(num_blocks)]
        for block_id in taken:
            self.ref_counts[block_id] = 1
            self.generations[block_id] += 1
        return taken

    def hold(self, block_ids: Sequence[BlockId]) -> None:
        """Add a reference to each of these blocks.

        Raises:
            ValueError: one of them is free. Nothing changed.
        """
        if any(not self.ref_counts[b] and not self._findable[b] for b in block_ids):
            raise ValueError("a free block holds nothing to refer to")
        for block_id in block_ids:
            if not self.ref_counts[block_id]:
                self._unlink(block_id)
                self.num_cached -= 1
                self.generations[block_id] += 1
            self.ref_counts[block_id] += 1

    def release(self, block_id: BlockId) -> None:
        """Drop a reference. The last one makes the block cached if findable, else free.

        Raises:
            ValueError: nobody holds it. Nothing changed.
        """
        if not self.ref_counts[block_id]:
            raise ValueError(f"block {block_id} is not held")
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id]:
            return
        if self._findable[block_id]:
            self._append(block_id)
            self.num_cached += 1
        else:
            self._free.append(block_id)

    def touch(self, block_id: BlockId) -> None:
        """Make a cached block the most recently used one; others stay as they are."""
        if self.is_cached(block_id):
            self._unlink(block_id)
            self._append(block_id)

    def set_findable(self, block_id: BlockId) -> None:
        """Keep this held block, when released, for those who search its prefix.

        Raises:
            ValueError: nobody holds it. Nothing changed.
        """
        if not self.ref_counts[block_id]:
            raise ValueError(f"block {block_id} is not held")
        self._findable[block_id] = 1

    def forget(self, block_id: BlockId) -> bool:
        """The block is no longer findable; True if it was cached and is free now."""
        was_cached = self.is_cached(block_id)
        self._findable[block_id] = 0
        if was_cached:
            self._unlink(block_id)
            self.num_cached -= 1
            self._free.append(block_id)
        return was_cached

    def free_list(self) -> list[BlockId]:
        """The free blocks, a copy. For audits."""
        return list(self._free)

    def cached_list(self) -> list[BlockId]:
        """The cached blocks, oldest first, as the links say. For audits."""
        found: list[BlockId] = []
        block_id = self._newer[self._end]
        # A broken ring must end the audit with a finding, not hang it.
        while block_id != self._end and len(found) <= self.num_blocks:
            found.append(block_id)
            block_id = self._newer[block_id]
        return found

    def _append(self, block_id: BlockId) -> None:
        newest = self._older[self._end]
        self._newer[newest] = block_id
        self._older[block_id] = newest
        self._newer[block_id] = self._end
        self._older[self._end] = block_id

    def _unlink(self, block_id: BlockId) -> None:
        newer, older = self._newer[block_id], self._older[block_id]
        self._newer[older] = newer
        self._older[newer] = older
