"""Least recently used first: the reference."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

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

    def use(self, nodes: Sequence[Node]) -> None:
        """These are the most recently used ones now, the last one most of all."""
        for node in nodes:
            self._clock += 1
            node.stamp = self._clock

    def push(self, node: Node) -> None:
        """See EvictionPolicy."""
        self._num_pushed += 1
        heapq.heappush(self._heap, (node.stamp, -node.start, self._num_pushed, node))
        if len(self._heap) > self._limit:
            self._drop_stale()

    def pop(self, num_blocks: int) -> tuple[Node, int] | None:
        """See EvictionPolicy."""
        while self._heap:
            entry = self._heap[0]
            node = entry[3]
            size = len(node.blocks)
            if not self._is_valid(entry):
                heapq.heappop(self._heap)
            elif size > num_blocks:
                return node, num_blocks
            else:
                heapq.heappop(self._heap)
                return node, size
        return None

    def nodes(self) -> list[Node]:
        """See EvictionPolicy."""
        return [entry[3] for entry in self._heap if self._is_valid(entry)]

    def _is_valid(self, entry: _Entry) -> bool:
        stamp, _, _, node = entry
        return node.is_alive and node.stamp == stamp and not self._is_held(node)

    def _drop_stale(self) -> None:
        self._heap = [entry for entry in self._heap if self._is_valid(entry)]
        heapq.heapify(self._heap)
        self._limit = max(1024, _MOST_STALE * len(self._heap))
