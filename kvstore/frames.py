"""Reference counts and free lists of a pool's blocks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import OutOfBlocks
from kvstore.frame_records import FrameRecords
from kvstore.kill_points import Reached, ignore
from kvstore.types import BlockId

Ids = NDArray[np.int32]


class Region:
    """The blocks of one memory: ids from `first` on, the free ones as a stack."""

    def __init__(self, first: int, num_blocks: int) -> None:
        self.first, self.num_blocks = first, num_blocks
        self.num_cached = 0
        # Lowest id on top. The block released last is taken first: it is in the CPU's cache.
        self._free: Ids = np.arange(first + num_blocks - 1, first - 1, -1, dtype=np.int32)
        self.num_free = num_blocks

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free - self.num_cached

    def take(self, num_blocks: int) -> Ids:
        """Raises OutOfBlocks if too few are free. Nothing changed."""
        if num_blocks > self.num_free:
            raise OutOfBlocks(needed=num_blocks, free=self.num_free)
        first = self.num_free - num_blocks
        taken = self._free[first : self.num_free][::-1].copy()
        self.num_free = first
        return taken

    def give_back(self, block_ids: Ids) -> None:
        end = self.num_free + len(block_ids)
        self._free[self.num_free : end] = block_ids
        self.num_free = end

    def keep_free(self, is_free: NDArray[np.bool_]) -> None:
        """Rebuild the stack from a mask over this region's blocks."""
        ids = np.flatnonzero(is_free)[::-1].astype(np.int32) + np.int32(self.first)
        self._free[: len(ids)] = ids
        self.num_free = len(ids)

    def free_list(self) -> list[BlockId]:
        ids: list[BlockId] = self._free[: self.num_free].tolist()
        return ids


class Frames:
    """A fixed set of blocks, each free, cached or held.

    - held: at least one reference
    - cached: no reference, but findable by its prefix
    - free: no reference and not findable

    One array per field and one call per batch of blocks: the time of a call grows with
    its batch, not with the pool. Not thread-safe: one event loop owns them.
    Blocks of the page pool come first, then those of the host pool.
    Invariant at every return, in each region: num_free + num_cached + num_held ==
    num_blocks.
    """

    def __init__(
        self, records: FrameRecords, num_host_blocks: int = 0, reached: Reached = ignore
    ) -> None:
        """All blocks are free. The last `num_host_blocks` of the records are the host's."""
        self.records = records
        self.num_blocks = records.num_frames - num_host_blocks
        self.device = Region(0, self.num_blocks)
        self.host = Region(self.num_blocks, num_host_blocks)
        self.ref_counts = records.ref_counts
        # Changes whenever a block may begin to hold something else, so that whoever
        # remembers a block can tell.
        self.generations = records.generations
        self.findable = records.findable
        self._reached = reached

    @property
    def num_free(self) -> int:
        return self.device.num_free

    @property
    def num_cached(self) -> int:
        return self.device.num_cached

    @property
    def num_held(self) -> int:
        return self.device.num_held

    def take(self, num_blocks: int, region: Region | None = None) -> Ids:
        """Hold `num_blocks` free blocks, of the page pool unless said otherwise.

        Raises:
            OutOfBlocks: too few are free. Nothing changed.
        """
        taken = (region or self.device).take(num_blocks)
        self._reached("frames.take.before")
        self.ref_counts[taken] = 1
        self.generations[taken] += 1
        self._reached("frames.take.after")
        return taken

    def hold(self, block_ids: Ids) -> int:
        """Add a reference to each of these blocks, which are distinct.

        Returns how many of the page pool's were cached until now.

        Raises:
            ValueError: one of them is free. Nothing changed.
        """
        counts = self.ref_counts[block_ids]
        unheld = block_ids[counts == 0]
        if not self.findable[unheld].all():
            raise ValueError("a free block holds nothing to refer to")
        self.ref_counts[block_ids] = counts + 1
        num_device = 0
        for region, ids in self._by_region(unheld):
            region.num_cached -= len(ids)
            num_device += len(ids) if region is self.device else 0
        return num_device

    def release(self, block_ids: Ids) -> tuple[Ids, int]:
        """Drop a reference of each of these blocks, which are distinct.

        The last one makes a block cached if it is findable, else free; those at the end
        of `block_ids` are taken again first. Returns those that are cached now, and how
        many of the page pool's are free now.

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
        for region, ids in self._by_region(cached):
            region.num_cached += len(ids)
        return cached, self._give_back(unheld[~kept])

    def remember(
        self, block_ids: Ids, parent: BlockId, namespace: int, data: bytes | memoryview
    ) -> None:
        """These held blocks, one after the other behind `parent`, hold the tokens `data`.

        They are findable from now on, and kept for those who search them when released.

        Raises:
            ValueError: nobody holds one of them. Nothing changed.
        """
        if not self.ref_counts[block_ids].all():
            raise ValueError("a block is not held")
        self._reached("frames.remember.before")
        records = self.records
        records.set_parent(block_ids[0], parent)
        if len(block_ids) > 1:
            records.parents[block_ids[1:]] = block_ids[:-1]
            records.parent_generations[block_ids[1:]] = self.generations[block_ids[:-1]]
        records.namespaces[block_ids] = namespace
        records.tokens[block_ids] = np.frombuffer(data, "<i4").reshape(-1, records.block_size)
        self.findable[block_ids] = True  # last: what is findable is complete
        self._reached("frames.remember.after")

    def forget(self, block_ids: Ids) -> int:
        """These findable blocks no longer are. How many of the page pool's are free now."""
        self._reached("frames.forget.before")
        self.findable[block_ids] = False
        self._reached("frames.forget.after")
        unheld = block_ids[self.ref_counts[block_ids] == 0]
        for region, ids in self._by_region(unheld):
            region.num_cached -= len(ids)
        return self._give_back(unheld)

    def is_held(self, block_id: BlockId) -> bool:
        return bool(self.ref_counts[block_id])

    def is_host(self, block_id: BlockId) -> bool:
        return block_id >= self.num_blocks

    def count_unheld(self, block_ids: Ids) -> int:
        return len(block_ids) - int(np.count_nonzero(self.ref_counts[block_ids]))

    def recount(self, ref_counts: NDArray[np.int32]) -> None:
        """Take these reference counts and make the rest follow: a repair."""
        self.ref_counts[:] = ref_counts
        for region in (self.device, self.host):
            part = slice(region.first, region.first + region.num_blocks)
            unheld = self.ref_counts[part] == 0
            region.keep_free(unheld & ~self.findable[part])
            region.num_cached = int(np.count_nonzero(unheld & self.findable[part]))

    def _by_region(self, block_ids: Ids) -> list[tuple[Region, Ids]]:
        if not self.host.num_blocks:
            return [(self.device, block_ids)]
        is_host = block_ids >= self.num_blocks
        return [(self.device, block_ids[~is_host]), (self.host, block_ids[is_host])]

    def _give_back(self, block_ids: Ids) -> int:
        num_device = 0
        for region, ids in self._by_region(block_ids):
            region.give_back(ids)
            num_device += len(ids) if region is self.device else 0
        return num_device
