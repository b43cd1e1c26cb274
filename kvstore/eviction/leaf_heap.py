"""Nodes by priority, of which only those with nothing to evict below them are taken."""

from __future__ import annotations

import heapq

from kvstore.eviction.policy import IsHeld
from kvstore.prefix_tree import Node

# Stale entries are dropped when they are this many times the others.
_MOST_STALE = 4

_Entry = tuple[float, int, Node]


class LeafHeap:
    """Nodes without references; the leaf with the lowest priority is the next one.

    A node whose turn comes while nodes below it could be evicted waits for them. Its
    `stamp` is the number of its latest entry: older entries, and those of nodes that are held or
    dead by now, are passed over.
    Invariant: every pushed node that is alive, not held and not taken has one valid entry, or
    waits.
    """

    def __init__(self, is_held: IsHeld) -> None:
        self._is_held = is_held
        self._heap: list[_Entry] = []
        self._waiting: dict[Node, _Entry] = {}
        self._num_pushed = 0
        self._limit = 1024

    def push(self, node: Node, priority: float) -> None:
        """Add a node, or move it."""
        self._num_pushed += 1
        node.stamp = self._num_pushed
        self._waiting.pop(node, None)
        heapq.heappush(self._heap, (priority, node.stamp, node))
        if len(self._heap) > self._limit:
            self._drop_stale()

    def peek(self) -> tuple[Node, float] | None:
        """The leaf with the lowest priority, and that; among equals the first one pushed."""
        while self._heap:
            entry = self._heap[0]
            if not self._is_valid(entry):
                heapq.heappop(self._heap)
            elif self._has_evictable_child(entry[2]):
                self._waiting[entry[2]] = heapq.heappop(self._heap)
            else:
                return entry[2], entry[0]
        return None

    def take(self) -> None:
        """Remove what `peek` has shown, with all of its blocks or for another queue."""
        node = heapq.heappop(self._heap)[2]
        node.stamp = 0
        self.wake(node)

    def wake(self, node: Node) -> None:
        """A node is evicted: the one above it may have become a leaf by that."""
        above = self._waiting.pop(node.parent, None) if node.parent else None
        if above is not None:
            heapq.heappush(self._heap, above)

    def nodes(self) -> list[Node]:
        """Those that are in it, whether they wait or not."""
        entries = [*self._heap, *self._waiting.values()]
        return [entry[2] for entry in entries if self._is_valid(entry)]

    def _is_valid(self, entry: _Entry) -> bool:
        _, stamp, node = entry
        return node.stamp == stamp and node.is_alive and not self._is_held(node)

    def _has_evictable_child(self, node: Node) -> bool:
        return any(not self._is_held(child) for child in node.children.values())

    def _drop_stale(self) -> None:
        self._heap = [entry for entry in self._heap if self._is_valid(entry)]
        heapq.heapify(self._heap)
        self._waiting = {n: entry for n, entry in self._waiting.items() if self._is_valid(entry)}
        self._limit = max(1024, _MOST_STALE * len(self._heap))
