"""Greedy dual size frequency: rarely used and cheap to recompute first.

Source: Cherkasova 1998, Improving WWW proxies performance with Greedy-Dual-Size-Frequency
caching policy, HPL-98-69.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.eviction.leaf_heap import LeafHeap
from kvstore.eviction.policy import IsHeld
from kvstore.prefix_tree import Node

# Blocks before a block at which attention to them costs as much as all else in computing
# it: with 16 tokens a block, 8192 tokens. It is about 6 times the hidden size of a model.
_EVEN_DEPTH = 512


class Gdsf:
    """The lowest of `age + uses * cost` first.

    `cost` is that of recomputing a block, which grows with its depth. `age` is the highest
    priority that was ever evicted: it lets go of what was used often, long ago. `record` is the
    number of uses and the age at the last one.
    """

    def __init__(self, num_blocks: int, is_held: IsHeld) -> None:  # noqa: ARG002 - all have it
        self._heap = LeafHeap(is_held)
        self._age = 0.0

    def use(self, nodes: Sequence[Node]) -> None:
        """Count a use of each."""
        for node in nodes:
            num_uses, _ = node.record or (0, 0.0)
            node.record = (num_uses + 1, self._age)

    def push(self, node: Node) -> None:
        """See EvictionPolicy."""
        num_uses, age = node.record or (0, self._age)
        self._heap.push(node, age + num_uses * (1 + node.start / _EVEN_DEPTH))

    def pop(self, num_blocks: int) -> tuple[Node, int] | None:
        """See EvictionPolicy."""
        shown = self._heap.peek()
        if shown is None:
            return None
        node, priority = shown
        self._age = max(self._age, priority)
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
