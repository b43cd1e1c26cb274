"""Blocks with a memory: held, free, or kept for whoever comes with the same prefix."""

from __future__ import annotations

from array import array

import numpy as np

from kvstore.errors import OutOfBlocks
from kvstore.eviction import DEFAULT_POLICY, POLICIES, EvictionPolicy
from kvstore.frames import Frames, Ids
from kvstore.prefix_tree import Chain, Node, PrefixTree
from kvstore.types import Namespace


class BlockPool:
    """The frames of a pool and the tree of the prefixes in them.

    Invariant: a block is in the tree exactly if its frame is findable. A block is
    evicted together with everything that can only be found through it, so that no
    cached block is ever out of reach.
    """

    def __init__(self, num_blocks: int, block_size: int, eviction: str = DEFAULT_POLICY) -> None:
        self.frames = Frames(num_blocks)
        self.tree = PrefixTree(num_blocks, block_size)
        self.queue: EvictionPolicy = POLICIES[eviction](num_blocks, self._is_held)
        self.num_evictions = 0

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give."""
        return self.frames.num_free + self.frames.num_cached

    def match(self, namespace: Namespace, data: bytes) -> tuple[Chain, array[int]]:
        """The longest cached prefix of whole blocks of `data`, and its blocks; not held yet."""
        chain = self.tree.match(namespace, data)
        self._queue_split()
        blocks = array("i")
        for node in reversed(list(self.tree.path(chain))):
            blocks += node.blocks
        return chain, blocks

    def hold(self, block_ids: array[int]) -> None:
        """Take references to the blocks of a match."""
        self.frames.hold(_ids(block_ids))

    def count_unheld(self, matches: list[array[int]]) -> int:
        """Blocks of these matches that are not held, each counted once."""
        if len(matches) == 1:
            return self.frames.count_unheld(_ids(matches[0]))
        return self.frames.count_unheld(np.unique(np.concatenate([*map(_ids, matches), _NONE])))

    def allocate(self, num_blocks: int) -> array[int]:
        """Hold `num_blocks` blocks: free ones first, then cached ones as the policy says.

        Raises:
            OutOfBlocks: too few are free or cached. The pool is unchanged.
        """
        if num_blocks > self.num_available:
            raise OutOfBlocks(needed=num_blocks, free=self.num_available)
        while (missing := num_blocks - self.frames.num_free) > 0:
            self._evict(missing)
        return _packed(self.frames.take(num_blocks))

    def refresh(self, chain: Chain) -> None:
        """Restart a chain whose node was evicted: its blocks can be registered again."""
        if not chain.is_alive:
            chain.restart()

    def register(self, chain: Chain, block_ids: array[int], data: bytes) -> None:
        """Make held blocks findable, those after the chain, whose tokens are `data`.

        The chain is alive (see `refresh`). A prefix that another sequence registered
        already stays as it is; the own block is then a private copy, and what follows
        is registered below the other's.
        """
        new = self.tree.register(chain, data, block_ids)
        if new:
            ids = _ids(new)
            self.frames.set_findable(ids)
            self._separate(chain, ids)
        self._queue_split()

    def _separate(self, chain: Chain, new: Ids) -> None:
        """Cut the node of new blocks where those who hold them change."""
        counts = self.frames.ref_counts[new]
        if counts.max() == 1:
            return
        first = chain.num_blocks - len(new)
        for at in [0, *(np.flatnonzero(np.diff(counts)) + 1).tolist()]:
            self.tree.separate(new[at], first + at)
        self.tree.freeze(chain)

    def release(self, chain: Chain, block_ids: array[int]) -> None:
        """Drop the references of a sequence.

        Raises:
            ValueError: one of them is not held, or is listed twice. Nothing changed.
        """
        if len(set(block_ids)) != len(block_ids):
            raise ValueError("a block table cannot list a block twice")
        path = list(self.tree.path(chain)) if chain.is_alive else []
        self._drop(path, block_ids)

    def share(self, chain: Chain, block_ids: array[int]) -> Chain:
        """Hold a sequence's blocks once more; the chain of the second one."""
        self.frames.hold(_ids(block_ids))
        self.tree.freeze(chain)
        return Chain(chain.namespace, chain.node, chain.num_blocks)

    def cut(self, chain: Chain, num_blocks: int, block_ids: array[int], first_index: int) -> None:
        """Drop the blocks of a sequence that stand in its table from `first_index` on.

        The sequence goes on; its chain keeps at most `num_blocks`.
        """
        self.refresh(chain)
        left = self.tree.retreat(chain, num_blocks) if chain.num_blocks > num_blocks else []
        if block_ids:
            # Others may have put our blocks into the tree: what we keep must be a node apart.
            self.tree.separate(block_ids[0], first_index)
        self._drop(left, block_ids)

    def _drop(self, path: list[Node], block_ids: array[int]) -> None:
        """Drop references, and use the nodes of `path`, the last one first."""
        # Tail first. A tail block's key covers the whole prefix before it, so it is the
        # least likely to match again and should be reused soonest.
        cached = self.frames.release(_ids(block_ids)[::-1])
        self._queue_split()
        # Blocks beyond our chain that another sequence with the same ones registered.
        others = set(self.tree.owners[cached].tolist()).difference(path) if len(cached) else ()
        used = [*sorted(others, key=lambda node: -node.start), *path]
        self.queue.use(used)
        for node in used:
            if not self._is_held(node):
                self.queue.push(node)

    def _evict(self, num_blocks: int) -> None:
        """Make one node's last blocks free, no more than `num_blocks` of them."""
        victim = self.queue.pop(num_blocks)
        if victim is None:
            raise AssertionError("a cached block is in no node that can be evicted")
        node, count = victim
        if node.children:
            # Only found through this one, and held: by sequences with an own copy of it.
            self.num_evictions += self.frames.forget(_ids(self.tree.prune(node)))
        self.num_evictions += self.frames.forget(_ids(self.tree.trim(node, count)))

    def _queue_split(self) -> None:
        """New upper parts of nodes are to be evicted like the lower ones."""
        if self.tree.split_nodes:
            for node in self.tree.split_nodes:
                if not self._is_held(node):
                    self.queue.push(node)
            self.tree.split_nodes.clear()

    def _is_held(self, node: Node) -> bool:
        return self.frames.is_held(node.blocks[0])


_NONE = np.array([], np.int32)


def _ids(block_ids: array[int]) -> Ids:
    return np.array(block_ids, np.int32)


def _packed(ids: Ids) -> array[int]:
    packed = array("i")
    packed.frombytes(ids.tobytes())
    return packed
