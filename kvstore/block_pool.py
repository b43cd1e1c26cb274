"""Blocks with a memory: held, free, or kept for whoever comes with the same prefix."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from kvstore.events import EventLog, EvictionCause
from kvstore.eviction import DEFAULT_POLICY, POLICIES, EvictionPolicy
from kvstore.frame_records import NO_PARENT, FrameRecords
from kvstore.frames import Frames, Ids
from kvstore.host_cache import HostCache
from kvstore.kill_points import Reached, ignore
from kvstore.prefix_tree import Chain, Node, PrefixTree
from kvstore.tenants import Partition, Tenant, Tenants
from kvstore.types import BlockId, Namespace, TenantLimits


class BlockPool:
    """The frames of a pool and the tree of the prefixes in them.

    Invariant: a block is in the tree exactly if its frame is findable, or if a copy to the
    host pool is still on its way into it. A block is evicted together with everything that
    can only be found through it, so that no cached block is ever out of reach.
    """

    def __init__(
        self,
        records: FrameRecords,
        *,
        num_host_blocks: int = 0,
        limits: Mapping[str, TenantLimits] | None = None,
        eviction: str = DEFAULT_POLICY,
        reached: Reached = ignore,
    ) -> None:
        """All blocks are free. Raises InvalidRequest for limits beyond the pool."""
        self.frames = Frames(records, num_host_blocks, reached)
        self.tree = PrefixTree(records.num_frames, records.block_size)
        new_queue = partial(POLICIES[eviction], self.frames.num_blocks, self.is_held)
        self.tenants = Tenants(self.frames.num_blocks, limits or {}, new_queue)
        self.events = EventLog(
            self.tree, records.num_frames, records.block_size, moves=num_host_blocks > 0
        )
        host_queue = POLICIES["lru"](num_host_blocks, self.is_held)
        self.host = HostCache(self.frames, self.tree, self.events, host_queue)
        self.pin_counts = np.zeros(self.frames.num_blocks, np.int32)
        self.evictions: Counter[EvictionCause] = Counter()  # blocks whose KV was given up
        self.clock = 0
        self.on_root: Callable[[int, Namespace], None] = _ignore_root

    def carry_over(self, before: BlockPool) -> None:
        """Go on counting where an earlier object for the same frames ended."""
        self.evictions = before.evictions
        self.host.carry_over(before.host)
        for tenant in before.tenants.all():
            self.tenants.get(tenant.name).num_prompt_tokens = tenant.num_prompt_tokens
            self.tenants.get(tenant.name).num_hit_tokens = tenant.num_hit_tokens

    # --- finding and holding ------------------------------------------------

    def match(self, namespace: Namespace, data: bytes) -> tuple[Chain, array[int]]:
        """The longest cached prefix of whole blocks of `data`, and its blocks; not held yet.

        Blocks of the page pool come first; from some point on all may be the host pool's.
        """
        chain = self.tree.match(namespace, data)
        self._queue_split()
        blocks = array("i")
        for node in reversed(list(self.tree.path(chain))):
            blocks += node.blocks
        return chain, blocks

    def hold(self, block_ids: array[int], tenant: Tenant) -> None:
        """Take references to the blocks of a match."""
        num_new = self.frames.hold(_ids(block_ids))
        tenant.count(held=num_new, cached=-num_new)

    def count_unheld(self, matches: list[array[int]]) -> int:
        """Blocks of these matches that are not held, each counted once."""
        if len(matches) == 1:
            return self.frames.count_unheld(_ids(matches[0]))
        return self.frames.count_unheld(np.unique(np.concatenate([*map(_ids, matches), _NONE])))

    def allocate(self, num_blocks: int, tenant: Tenant) -> array[int]:
        """Hold `num_blocks` blocks: free ones first, then those that are worth least.

        Raises:
            OutOfBlocks, QuotaExceeded: the tenant cannot have them. The pool is unchanged.
        """
        self.tenants.check_room({tenant: num_blocks})
        while (excess := self.tenants.over_quota(tenant, num_blocks)) > 0:
            self._evict(tenant.partition, excess, EvictionCause.QUOTA)
        while (missing := num_blocks - self.frames.num_free) > 0:
            victim, most = self.tenants.victim(tenant)
            self._evict(victim, min(missing, most), EvictionCause.ROOM)
        tenant.count(held=num_blocks)
        return _packed(self.frames.take(num_blocks))

    def release(self, chain: Chain, block_ids: array[int]) -> None:
        """Drop the references of a sequence.

        Raises:
            ValueError: one of them is not held, or is listed twice. Nothing changed.
        """
        if len(set(block_ids)) != len(block_ids):
            raise ValueError("a block table cannot list a block twice")
        path = list(self.tree.path(chain)) if chain.is_alive else []
        self._drop(path, block_ids, self.tenant(chain))

    def release_loose(self, block_ids: array[int], tenant: Tenant) -> None:
        """Drop references to distinct blocks, of either pool, that stand in no table."""
        ids = _ids(block_ids)
        is_host = ids >= self.frames.num_blocks
        cached, _ = self.frames.release(ids[is_host])
        self.host.use(cached)
        cached, num_freed = self.frames.release(ids[~is_host])
        tenant.count(held=-len(cached) - num_freed, cached=len(cached))
        for node in self.tree.owners[cached].tolist():
            self._use([node])

    def isolate(self, block_id: BlockId) -> None:
        """Let the first block of a node be one of its own, so that it can be held alone."""
        node = self.tree.owners[block_id]
        self.tree.upper_part(node, 1).grower = None
        self._queue_split()

    def share(
        self, chain: Chain, block_ids: array[int], others: array[int], num_blocks: int
    ) -> Chain:
        """Hold a sequence's first blocks once more, but not the `others` behind them.

        Returns the chain of the second one, of at most `num_blocks`.
        """
        self.frames.hold(_ids(block_ids))
        self.tree.freeze(chain)
        shared = Chain(chain.namespace, chain.node, chain.num_blocks)
        self.refresh(shared)
        if shared.num_blocks > num_blocks:
            self.tree.retreat(shared, num_blocks)
        if others:
            self.tree.separate(others[0], len(block_ids))
        self._queue_split()
        return shared

    def cut(self, chain: Chain, num_blocks: int, block_ids: array[int], first_index: int) -> None:
        """Drop the blocks of a sequence that stand in its table from `first_index` on.

        The sequence goes on; its chain keeps at most `num_blocks`.
        """
        self.refresh(chain)
        left = self.tree.retreat(chain, num_blocks) if chain.num_blocks > num_blocks else []
        if block_ids:
            # Others may have put our blocks into the tree: what we keep must be a node apart.
            self.tree.separate(block_ids[0], first_index)
        self._drop(left, block_ids, self.tenant(chain))

    def pin(self, block_ids: array[int], tenant: Tenant) -> None:
        """Hold blocks of a match for a pin."""
        self.hold(block_ids, tenant)
        ids = _ids(block_ids)
        tenant.num_pinned += int(np.count_nonzero(self.pin_counts[ids] == 0))
        self.pin_counts[ids] += 1

    def unpin(self, chain: Chain, block_ids: array[int]) -> None:
        """Drop the references of a pin."""
        ids = _ids(block_ids)
        self.pin_counts[ids] -= 1
        self.tenant(chain).num_pinned -= int(np.count_nonzero(self.pin_counts[ids] == 0))
        self.release(chain, block_ids)

    # --- the tree -----------------------------------------------------------

    def refresh(self, chain: Chain) -> None:
        """Restart a chain whose node was evicted, or went to the host pool with the sequence
        whose blocks they were: its own blocks can be registered again."""
        node = chain.node
        is_away = node is not None and node.blocks and self.frames.is_host(node.blocks[0])
        if is_away or not chain.is_alive:
            chain.restart()

    def register(self, chain: Chain, block_ids: array[int], data: bytes) -> None:
        """Make held blocks findable, those after the chain, whose tokens are `data`.

        The chain is alive (see `refresh`). A prefix that another sequence registered
        already stays as it is; the own block is then a private copy, and what follows
        is registered below the other's. Blocks of the host pool give way to ours.
        """
        if self.host.num_blocks:
            self._promote(chain, block_ids, data)
        new = self.tree.register(chain, data, block_ids)
        if new and chain.node is not None:
            self.events.stored(chain, new, data)
            self._remember(chain.node, len(chain.node.blocks) - len(new), chain.namespace)
            if self._separate(new, chain.num_blocks - len(new)):
                self.tree.freeze(chain)
        self._queue_split()

    def _promote(self, chain: Chain, block_ids: array[int], data: bytes) -> None:
        """Put our blocks where the tree has the host pool's for the same tokens."""
        first = chain.num_blocks
        for node, count in self.tree.along(chain, data):
            if not self.frames.is_host(node.blocks[0]):
                continue
            whole = self.tree.upper_part(node, count)
            at = whole.start - first
            old = self.tree.relocate(whole, block_ids[at : at + len(whole.blocks)])
            self.host.queue.forget(whole)
            self.events.moved(old, whole.blocks[:])
            self.events.arrived(whole.blocks[:])
            self._remember(whole, 0, chain.namespace)
            self.host.adopt_children(whole)
            self.frames.forget(_ids(old))
            self._separate(whole.blocks, whole.start)

    def _remember(self, node: Node, at: int, namespace: Namespace) -> None:
        """Write down what the blocks of a node from index `at` on hold."""
        parent = node.parent
        assert parent is not None
        before = node.blocks[at - 1 : at] if at else parent.blocks[-1:]
        data = memoryview(node.data)[at * self.tree.block_bytes :]
        root = self.tree.root(namespace)
        while self.tree.new_roots:  # first on paper: frame records name it by its number
            new = self.tree.new_roots.pop()
            self.on_root(new.number, new.namespace)
        self.frames.remember(
            _ids(node.blocks[at:]), before[0] if before else NO_PARENT, root.number, data
        )

    def _separate(self, blocks: array[int], first: int) -> bool:
        """Cut a node where those who hold its last `blocks` change; whether others do."""
        blocks = blocks[:]
        counts = self.frames.ref_counts[_ids(blocks)]
        if counts.max() == 1:
            return False
        for at in [0, *(np.flatnonzero(np.diff(counts)) + 1).tolist()]:
            self.tree.separate(blocks[at], first + at)
        return True

    # --- letting go ---------------------------------------------------------

    def _drop(self, path: list[Node], block_ids: array[int], tenant: Tenant) -> None:
        """Drop references, and use the nodes of `path`, the last one first."""
        # Tail first. A tail block's key covers the whole prefix before it, so it is the
        # least likely to match again and should be reused soonest.
        cached, num_freed = self.frames.release(_ids(block_ids)[::-1])
        tenant.count(held=-len(cached) - num_freed, cached=len(cached))
        self._queue_split()
        # Blocks beyond our chain that another sequence with the same ones registered.
        others = set(self.tree.owners[cached].tolist()).difference(path) if len(cached) else ()
        self._use([*sorted(others, key=lambda node: -node.start), *path])

    def _use(self, nodes: list[Node]) -> None:
        """Use nodes of one path, deepest first. Those in the host pool are the deepest."""
        for queue, group in itertools.groupby(nodes, self.queue_of):
            its = list(group)
            queue.use(its)
            for node in its:
                self.clock += 1
                self.frames.records.last_uses[_ids(node.blocks)] = self.clock
                if not self.is_held(node):
                    queue.push(node)

    def _evict(self, partition: Partition, num_blocks: int, cause: EvictionCause) -> None:
        """Make one node's last blocks free, no more than `num_blocks` of them."""
        victim = partition.queue.pop(num_blocks)
        if victim is None:
            raise AssertionError("a cached block is in no node that can be evicted")
        node, num_last = victim
        tenant = self.tenant_of(node)
        num_freed = self.host.demote(node, num_last) if self.host.is_open else 0
        if num_freed:
            partition.queue.forget(node)
        else:
            # What is below can only be found through this one: blocks of sequences with an
            # own copy of it, and the host pool's.
            if node.children:
                num_freed = self._forget(self.tree.prune(node), EvictionCause.PREFIX)
            num_freed += self._forget(self.tree.trim(node, num_last), cause)
        tenant.count(cached=-num_freed)
        self._queue_split()

    def _forget(self, block_ids: array[int], cause: EvictionCause) -> int:
        """These blocks are in the tree no more; how many of the page pool's are free now."""
        num_freed = self.frames.forget(_ids(block_ids))
        self.evictions[cause] += num_freed
        self.events.evicted(block_ids, cause)
        return num_freed

    def _queue_split(self) -> None:
        """New upper parts of nodes are to be evicted like the lower ones."""
        if self.tree.split_nodes:
            for node in self.tree.split_nodes:
                if not self.is_held(node):
                    self.queue_of(node).push(node)
            self.tree.split_nodes.clear()

    # --- who is who ---------------------------------------------------------

    def tenant(self, chain: Chain) -> Tenant:
        return self.tenants.get(chain.namespace.tenant)

    def tenant_of(self, node: Node) -> Tenant:
        """Of a node with blocks."""
        number = int(self.frames.records.namespaces[node.blocks[0]])
        return self.tenants.get(self.tree.namespace_of(number).tenant)

    def queue_of(self, node: Node) -> EvictionPolicy:
        if self.frames.is_host(node.blocks[0]):
            return self.host.queue
        return self.tenant_of(node).partition.queue

    def is_held(self, node: Node) -> bool:
        return self.frames.is_held(node.blocks[0])

    def is_findable(self, block_id: BlockId) -> bool:
        return bool(self.frames.findable[block_id])


def _ignore_root(number: int, namespace: Namespace) -> None:
    """Nobody writes namespaces down."""


_NONE = np.array([], np.int32)


def _ids(block_ids: array[int]) -> Ids:
    return np.array(block_ids, np.int32)


def _packed(ids: Ids) -> array[int]:
    packed = array("i")
    packed.frombytes(ids.tobytes())
    return packed
