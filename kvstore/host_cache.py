"""The host pool: where blocks go that the page pool has no room for."""

from __future__ import annotations

import operator
import time
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.events import EventLog, EvictionCause
from kvstore.eviction import EvictionPolicy
from kvstore.frame_records import NO_PARENT
from kvstore.frames import Frames, Ids
from kvstore.prefix_tree import Node, PrefixTree
from kvstore.sequences import Sequence
from kvstore.types import BlockCopy, BlockId

# Of transfers that were not completed, which only costs measurements.
_MOST_SIZES = 4096


class TransferSize(NamedTuple):
    """Copies of a transfer: to or from the host pool, within the page pool, for swaps."""

    num_host: int = 0
    num_inside: int = 0
    num_swaps: int = 0


@dataclass(slots=True)
class _Arrival:
    """Blocks of the host pool whose contents are on their way.

    They are in the tree, or the tail of a suspended sequence.
    """

    transfer: int
    block_ids: Ids
    sequence: Sequence | None = None


class HostCache:
    """Prefixes in the host pool, below those in the page pool, in the same tree.

    Copies are not made here: they are handed out in the order in which they must be run,
    each batch under a transfer's number. What arrives is held, and not found by anybody,
    until the transfer is completed.
    """

    def __init__(
        self, frames: Frames, tree: PrefixTree, events: EventLog, queue: EvictionPolicy
    ) -> None:
        self._frames, self._tree, self._events = frames, tree, events
        self.queue = queue
        self.num_blocks = frames.host.num_blocks
        self.is_open = False  # whether what is evicted comes here: the caller runs copies
        self.num_demotions = 0
        self.num_evictions = 0
        self._sizes: dict[int, TransferSize] = {}  # of those that are under way
        self._copies: list[BlockCopy] = []
        self._arrivals: deque[_Arrival] = deque()
        # Above all numbers of earlier processes: one of theirs completes nothing of ours.
        self._transfer = time.time_ns()

    def demote(self, node: Node, count: int) -> int:
        """Move up to `count` last blocks of a node of the page pool here; how many.

        0 if there is no room, or if blocks below the node are in the page pool. Those that
        are moved become free there. Whoever called the page manager must run the copies.
        """
        if any(not self._frames.is_host(child.blocks[0]) for child in node.children.values()):
            return 0
        count = min(count, self.make_room(count))
        if not count:
            return 0
        if count < len(node.blocks):
            self._tree.upper_part(node, len(node.blocks) - count)  # the node keeps the rest
        new = self._frames.take(count, self._frames.host)
        old = self._tree.relocate(node, array("i", new.tolist()))
        self.adopt_children(node)
        self._events.moved(old, node.blocks[:])
        node.is_arriving = True
        self._send(old, new)
        self.num_demotions += count
        return self._frames.forget(np.array(old, np.int32))

    def store_tail(self, block_id: BlockId, sequence: Sequence) -> BlockId:
        """Copy a block that no prefix finds here, for a suspended sequence, which holds it.

        There must be room (see `make_room`).
        """
        new = self._frames.take(1, self._frames.host)
        self._frames.hold(new)
        self._send([block_id], new, sequence)
        return int(new[0])

    def _send(self, old: Iterable[BlockId], new: Ids, sequence: Sequence | None = None) -> None:
        self._arrivals.append(_Arrival(self._transfer, new, sequence))
        self._copies += map(BlockCopy, old, new.tolist())

    def adopt_children(self, node: Node) -> None:
        """The node's blocks were replaced: let those of its children name the new ones."""
        for child in node.children.values():
            self._frames.records.set_parent(child.blocks[0], node.blocks[-1])

    def make_room(self, count: int) -> int:
        """Give up what is worth least until `count` blocks are free; how many there are."""
        region = self._frames.host
        while region.num_free < count:
            victim = self.queue.pop(count - region.num_free)
            if victim is None:
                break
            node, num_last = victim
            self._forget(self._tree.prune(node), EvictionCause.PREFIX)
            self._forget(self._tree.trim(node, num_last), EvictionCause.ROOM)
        return region.num_free

    def _forget(self, block_ids: array[int], cause: EvictionCause) -> None:
        """These blocks of ours are in the tree no more."""
        before = self._frames.host.num_free
        self._frames.forget(np.array(block_ids, np.int32))
        self.num_evictions += self._frames.host.num_free - before
        self._events.evicted(block_ids, cause)

    def take_copies(
        self, others: TransferSize, num_besides: int = 0
    ) -> tuple[list[BlockCopy], int]:
        """The copies that have come up since the last call, and their transfer's number.

        `others` go with them, and so many copies within the page pool `besides`. The number
        is 0 if there are none, or only the latter.
        """
        if not (self._copies or others.num_host or others.num_inside):
            return [], 0
        copies, self._copies = self._copies, []
        size = others._replace(num_host=others.num_host + len(copies))
        self._sizes[self._transfer] = size._replace(num_inside=size.num_inside + num_besides)
        if len(self._sizes) > _MOST_SIZES:  # nobody says that they were run
            del self._sizes[next(iter(self._sizes))]
        self._transfer += 1
        return copies, self._transfer - 1

    def complete(self, transfer: int) -> tuple[TransferSize, list[Sequence]]:
        """The copies of all transfers up to this one were run: what they brought is here.

        Returns how many copies those were, and the suspended sequences whose tail it was.

        Raises:
            InvalidRequest: there was no such transfer yet.
        """
        if transfer >= self._transfer:
            raise InvalidRequest("completed_transfer", f"{transfer} was never given out")
        done = [number for number in self._sizes if number <= transfer]
        total = TransferSize()
        for number in done:
            total = TransferSize(*map(operator.add, total, self._sizes.pop(number)))
        tails = []
        while self._arrivals and self._arrivals[0].transfer <= transfer:
            arrival = self._arrivals.popleft()
            sequence = arrival.sequence
            if sequence is None:
                self._settle(arrival.block_ids)
            elif sequence.is_suspended and arrival.block_ids[0] in sequence.host_ids:
                sequence.has_host_tail = True
                tails.append(sequence)
            self._release(arrival.block_ids)
        return total, tails

    def abandon(self) -> None:
        """Whoever was to run the outstanding copies is gone: nothing arrives any more."""
        self._copies.clear()
        self._sizes.clear()
        while self._arrivals:
            block_ids = self._arrivals.pop().block_ids
            for node in self._nodes(block_ids):
                self._forget(self._tree.prune(node), EvictionCause.PREFIX)
                self._forget(self._tree.trim(node, len(node.blocks)), EvictionCause.ROOM)
            self._release(block_ids)

    def carry_over(self, before: HostCache) -> None:
        """Go on counting where an earlier object for the same frames ended."""
        self.num_demotions = before.num_demotions
        self.num_evictions = before.num_evictions
        self._transfer = before._transfer

    def arriving(self) -> list[BlockId]:
        """Blocks that are held because their contents are on their way. For audits."""
        return [b for arrival in self._arrivals for b in arrival.block_ids.tolist()]

    def use(self, block_ids: Ids) -> None:
        """Cached blocks of ours were let go of: the nodes they are in are evictable."""
        nodes = sorted(self._nodes(block_ids), key=lambda node: -node.start)
        self.queue.use(nodes)
        for node in nodes:
            self.queue.push(node)

    def _settle(self, block_ids: Ids) -> None:
        """Let the nodes of blocks that have arrived be found."""
        # Meanwhile they may have been cut in two, and parts of them evicted or replaced.
        for node in self._nodes(block_ids):
            parent = node.parent
            assert parent is not None
            before = parent.blocks[-1] if parent.blocks else NO_PARENT
            ids = np.array(node.blocks, np.int32)
            node.is_arriving = False
            self._events.arrived(node.blocks[:])
            self._frames.remember(ids, before, self._tree.number_of(node), bytes(node.data))

    def _release(self, block_ids: Ids) -> None:
        cached, _ = self._frames.release(block_ids)
        self.use(cached)

    def _nodes(self, block_ids: Ids) -> list[Node]:
        """The distinct nodes that have these blocks, first one first."""
        owners = dict.fromkeys(self._tree.owners[block_ids].tolist()) if len(block_ids) else ()
        return [node for node in owners if node is not None]
