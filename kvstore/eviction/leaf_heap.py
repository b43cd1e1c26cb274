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

    A node whose turn comes while nodes below it could be evicted waits for them. Nodes
    that are in no heap of this family do not count: they are another memory's. Entries
    that are not their node's latest, and those of nodes that are held or dead by now, are passed
    over.
    Invariant: every pushed node that is alive, not held, not taken and not forgotten has one
    valid entry in a heap of its family, or waits there.
    """

    def __init__(self, is_held: IsHeld, family: LeafHeap | None = None) -> None:
        """A node is in one heap of a family at most: the one it was pushed into last."""
        self._is_held = is_held
        self._latest: dict[Node, _Entry] = {} if family is None else family._latest
        self._heap: list[_Entry] = []
        self._waiting: dict[Node, _Entry] = {}
        self._num_pushed = 0
        self._limit = 1024

    def push(self, node: Node, priority: float) -> None:
        """Add a node, or move it."""
        self._num_pushed += 1
        entry = (priority, self._num_pushed, node)
        self._latest[node] = entry
        self._waiting.pop(node, None)
        heapq.heappush(self._heap, entry)
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
        """Remove what `peek` has shown."""
        node = heapq.heappop(self._heap)[2]
        del self._latest[node]
        self.wake(node)

    def forget(self, node: Node) -> None:
        """The node is in this heap no more."""
        self._latest.pop(node, None)
        self.wake(node)

    def wake(self, node: Node) -> None:
        """A node has gone: the one above it may have become a leaf by that."""
        above = self._waiting.pop(node.parent, None) if node.parent else None
        if above is not None:
            heapq.heappush(self._heap, above)

    def nodes(self) -> list[Node]:
        """Those that are in it, whether they wait or not."""
        entries = [*self._heap, *self._waiting.values()]
        return [entry[2] for entry in entries if self._is_valid(entry)]

    def _is_valid(self, entry: _Entry) -> bool:
        node = entry[2]
        return self._latest.get(node) is entry and node.is_alive and not self._is_held(node)

    def _has_evictable_child(self, node: Node) -> bool:
        latest = self._latest
        return any(child in latest and not self._is_held(child) for child in node.children.values())

    def _drop_stale(self) -> None:
        self._heap = [entry for entry in self._heap if self._is_valid(entry)]
        heapq.heapify(self._heap)
        self._waiting = {n: entry for n, entry in self._waiting.items() if self._is_valid(entry)}
        for node in [node for node in self._latest if not node.is_alive]:
            del self._latest[node]
        self._limit = max(1024, _MOST_STALE * len(self._heap))
