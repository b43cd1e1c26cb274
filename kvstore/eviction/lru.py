"""Least recently used first: the reference."""

from __future__ import annotations

import heapq

from kvstore.eviction.policy import IsHeld
from kvstore.prefix_tree import Node

# Stale entries are dropped when they are this many times the others.
_MOST_STALE = 4

_Entry = tuple[int, int, int, Node]


class Lru:
    """Nodes without references, least recently used first, the deeper first among equals.

    A node is used when one of its holders lets go of it; until then it cannot be evicted.
    Using one uses all before it, which keeps every node younger than what is below it. Entries
    of the heap are left behind when their node is used again, held or evicted, and passed
    over later.
    """

    def __init__(self, num_blocks: int, is_held: IsHeld) -> None:  # noqa: ARG002 - all have it
        self._is_held = is_held
        self._heap: list[_Entry] = []
        self._clock = 0
        self._num_pushed = 0
        self._limit = 1024

    def use(self, node: Node) -> None:
        """The node is the most recently used one now."""
        self._clock += 1
        node.stamp = self._clock

    def push(self, node: Node) -> None:
        """The node may be evicted, in its turn."""
        self._num_pushed += 1
        heapq.heappush(self._heap, (node.stamp, -node.start, self._num_pushed, node))
        if len(self._heap) > self._limit:
            self._drop_stale()

    def pop(self) -> Node | None:
        """Take out the node that should be evicted first."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._is_valid(entry):
                return entry[3]
        return None

    def nodes(self) -> list[Node]:
        """Those that may be evicted. For audits."""
        return [entry[3] for entry in self._heap if self._is_valid(entry)]

    def _is_valid(self, entry: _Entry) -> bool:
        stamp, _, _, node = entry
        return node.is_alive and node.stamp == stamp and not self._is_held(node)

    def _drop_stale(self) -> None:
        self._heap = [entry for entry in self._heap if self._is_valid(entry)]
        heapq.heapify(self._heap)
        self._limit = max(1024, _MOST_STALE * len(self._heap))
