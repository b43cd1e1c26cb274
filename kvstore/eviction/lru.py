"""Least recently used first: the reference."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.eviction.leaf_heap import LeafHeap
from kvstore.eviction.policy import IsHeld
from kvstore.prefix_tree import Node


class Lru:
    """Nodes without references, the least recently used leaf first.

    A node is used when one of its holders lets go of it; until then it cannot be evicted.
    Using one uses all before it, which keeps every node younger than what is below it.
    `stamp` is when it was used last.
    """

    def __init__(self, num_blocks: int, is_held: IsHeld) -> None:  # noqa: ARG002 - all have it
        self._heap = LeafHeap(is_held)
        self._clock = 0

    def use(self, nodes: Sequence[Node]) -> None:
        """These are the most recently used ones now, the last one most of all."""
        for node in nodes:
            self._clock += 1
            node.stamp = self._clock

    def push(self, node: Node) -> None:
        """See EvictionPolicy."""
        self._heap.push(node, node.stamp)

    def pop(self, num_blocks: int) -> tuple[Node, int] | None:
        """See EvictionPolicy."""
        shown = self._heap.peek()
        if shown is None:
            return None
        node = shown[0]
        count = min(num_blocks, len(node.blocks))
        if count == len(node.blocks):
            self._heap.take()
        return node, count

    def forget(self, node: Node) -> None:
        """See EvictionPolicy."""
        self._heap.forget(node)

    def nodes(self) -> list[Node]:
        """See EvictionPolicy."""
        return self._heap.nodes()
