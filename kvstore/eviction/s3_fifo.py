"""Three first-in first-out queues: newcomers, those that came again, and ghosts.

Source: Yang et al. 2023, FIFO queues are all you need for cache eviction (SOSP '23).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstore.eviction.ghosts import Ghosts
from kvstore.eviction.leaf_heap import LeafHeap
from kvstore.eviction.policy import IsHeld
from kvstore.prefix_tree import Node

_SMALL_PART = 10  # newcomers get one block in so many
_MOST_USES = 3


@dataclass(frozen=True, slots=True)
class _Seen:
    """Of a node: its place in its queue, and how often it was used since it entered that."""

    place: int
    num_uses: int
    is_main: bool


class S3Fifo:
    """Newcomers pass through a small queue; what is used in it again stays longer.

    A newcomer whose turn comes is evicted unless it was used again: then it moves on to
    the main queue, where each use is worth another round. What was evicted as a newcomer
    and comes again goes to the main queue at once. Places are counted in blocks, so the first
    place of the small queue tells how many blocks have come since.
    """

    def __init__(self, num_blocks: int, is_held: IsHeld) -> None:
        self._small = LeafHeap(is_held)
        self._main = LeafHeap(is_held, family=self._small)
        self._ghosts: Ghosts[bool] = Ghosts(num_blocks)
        self._most_small = num_blocks // _SMALL_PART
        self._num_arrived = 0
        self._num_rounds = 0

    def use(self, nodes: Sequence[Node]) -> None:
        """Count a use of each; the first one is its arrival."""
        for node in nodes:
            seen = node.record
            if seen is None:
                node.record = self._arrive(node)
            elif seen.num_uses < _MOST_USES:
                node.record = replace(seen, num_uses=seen.num_uses + 1)

    def push(self, node: Node) -> None:
        """See EvictionPolicy. The node keeps its place."""
        queue = self._main if node.record.is_main else self._small
        queue.push(node, node.record.place)

    def pop(self, num_blocks: int) -> tuple[Node, int] | None:
        """See EvictionPolicy."""
        while True:
            small, main = self._small.peek(), self._main.peek()
            if small and (not main or self._num_arrived - small[1] >= self._most_small):
                node, queue = small[0], self._small
            elif main:
                node, queue = main[0], self._main
            else:
                return None
            seen: _Seen = node.record
            if seen.num_uses:
                queue.take()
                self._go_round(node, seen)
                continue
            count = min(num_blocks, len(node.blocks))
            if queue is self._small:
                self._ghosts.add(node, count, True)
            if count == len(node.blocks):
                queue.take()
                # The node above may be in the other queue.
                self._small.wake(node)
                self._main.wake(node)
            return node, count

    def forget(self, node: Node) -> None:
        """See EvictionPolicy."""
        self._small.forget(node)
        self._main.forget(node)

    def nodes(self) -> list[Node]:
        """See EvictionPolicy."""
        return self._small.nodes() + self._main.nodes()

    def _arrive(self, node: Node) -> _Seen:
        if self._ghosts.find(node):
            self._num_rounds += 1
            return _Seen(self._num_rounds, 0, is_main=True)
        self._num_arrived += len(node.blocks)
        return _Seen(self._num_arrived, 0, is_main=False)

    def _go_round(self, node: Node, seen: _Seen) -> None:
        """To the end of the main queue, for one of its uses; all of them for a newcomer."""
        self._num_rounds += 1
        num_uses = seen.num_uses - 1 if seen.is_main else 0
        node.record = _Seen(self._num_rounds, num_uses, is_main=True)
        self._main.push(node, self._num_rounds)
