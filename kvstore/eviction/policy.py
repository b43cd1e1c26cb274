"""What the block pool asks of whoever decides which cached blocks go first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvstore.prefix_tree import Node

IsHeld = Callable[[Node], bool]


class EvictionPolicy(Protocol):
    """The nodes without references, in the order in which they should be evicted.

    A policy counts accesses and never looks at a clock, so that a replay gives the same
    order every time. Each call costs at most O(log n) per node, all in all. What it
    remembers of a node is in `stamp` and `record`; the tree gives both to the new upper part
    when it splits a node, so a record is replaced and never changed.

    Blocks are only found through those before them. A policy should therefore keep a node no
    shorter than what is below it: the pool prunes what would be out of reach otherwise.
    """

    def use(self, node: Node) -> None:
        """One of its holders lets go of it. All nodes of a path are used, deepest first."""
        ...

    def push(self, node: Node) -> None:
        """It has no references now and may be evicted, in its turn.

        A node is pushed again after it was popped and not evicted whole; entries of before
        are void.
        """
        ...

    def pop(self) -> Node | None:
        """Take out the node that should be evicted first; None if there is none.

        Nodes that are dead or held by now are passed over. The pool evicts from the node's
        tail, as much as it needs, and pushes the rest again.
        """
        ...

    def nodes(self) -> list[Node]:
        """Those that may be evicted. For audits."""
        ...


PolicyFactory = Callable[[int, IsHeld], EvictionPolicy]
"""A policy for a pool of so many blocks; the function tells whether a node has references."""
