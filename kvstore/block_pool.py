"""Blocks with a memory: held, free, or kept for whoever comes with the same prefix."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import OutOfBlocks
from kvstore.frames import Frames
from kvstore.prefix_index import Chain, PrefixIndex
from kvstore.types import BlockId, Namespace


class BlockPool:
    """The frames of a pool and the index of the prefixes in them.

    Invariant: a block is in the index exactly if its frame is findable. A block is
    evicted together with everything that can only be found through it, so that no
    cached block is ever out of reach.
    """

    def __init__(self, num_blocks: int) -> None:
        self.frames = Frames(num_blocks)
        self.index = PrefixIndex(num_blocks)
        self.num_evictions = 0

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give."""
        return self.frames.num_free + self.frames.num_cached

    def match(self, namespace: Namespace, keys: list[bytes]) -> list[BlockId]:
        """The blocks of the longest cached prefix. They are not held yet."""
        return self.index.match(namespace, keys)

    def hold(self, namespace: Namespace, block_ids: list[BlockId]) -> Chain:
        """Take references to the blocks of a match."""
        self.frames.hold(block_ids)
        return self.index.chain(namespace, block_ids)

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Hold `num_blocks` blocks: free ones first, then the least recently used.

        Raises:
            OutOfBlocks: too few are free or cached. The pool is unchanged.
        """
        if num_blocks > self.num_available:
            raise OutOfBlocks(needed=num_blocks, free=self.num_available)
        while self.frames.num_free < num_blocks:
            self._evict_oldest()
        return self.frames.take(num_blocks)

    def refresh(self, chain: Chain) -> None:
        """Restart a chain whose node was evicted: its blocks can be registered again."""
        if not self.index.is_alive(chain):
            chain.restart()

    def register(self, chain: Chain, block_ids: Sequence[BlockId], keys: list[bytes]) -> None:
        """Make held blocks findable. `keys` are those of the blocks that follow the chain.

        The chain is alive (see `refresh`). A prefix that another sequence registered
        already stays as it is; the own block is then a private copy, and what follows
        is registered below the other's.
        """
        for key in keys:
            block_id = block_ids[chain.num_blocks]
            if self.index.advance(chain, key, block_id):
                self.frames.set_findable(block_id)

    def release(self, chain: Chain, block_ids: Sequence[BlockId]) -> None:
        """Drop the references of a sequence.

        Raises:
            ValueError: one of them is not held, or is listed twice. Nothing changed.
        """
        if len(set(block_ids)) != len(block_ids):
            raise ValueError("a block table cannot list a block twice")
        if any(not self.frames.ref_counts[block_id] for block_id in block_ids):
            raise ValueError("a block of the table is not held")
        num_indexed = chain.num_blocks if self.index.is_alive(chain) else 0
        node = chain.node
        # Tail first. A tail block's key covers the whole prefix before it, so it is the
        # least likely to match again and should be reused soonest.
        for position in range(len(block_ids) - 1, -1, -1):
            if position < num_indexed:
                if node != block_ids[position]:
                    # Ours was a copy of a prefix that we registered blocks below.
                    self.frames.touch(node)
                node = self.index.parent(node)
            self.frames.release(block_ids[position])

    def _evict_oldest(self) -> None:
        oldest = self.frames.oldest_cached
        if oldest is None:
            raise OutOfBlocks(needed=1, free=0)
        for block_id in self.index.remove(oldest):
            self.num_evictions += self.frames.forget(block_id)
