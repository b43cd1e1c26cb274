"""What the block pool asks of whoever decides which cached blocks go first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvstore.prefix_tree import Node

IsHeld = Callable[[Node], bool]


class EvictionPolicy(Protocol):
    """The nodes without references, in the order in which they should be evicted.

    A policy counts accesses and never looks at a clock, so that a replay gives the same
    order every time. Its cost per node is at most logarithmic in the number of nodes, all in
    all. What it knows of a node is in `stamp` and `record`; the tree gives both to the new
    upper part when it splits a node.

    Blocks are only found through those before them: what is below an evicted node is
    pruned. A policy takes a node after those below it, as long as these can be evicted.
    """

    def use(self, nodes: Sequence[Node]) -> None:
        """A holder lets go of these nodes: its path, deepest first.

        Nodes that it shares with nobody else's path, if any, come before the path.
        """
        ...

    def push(self, node: Node) -> None:
        """It has no references now and may be evicted, in its turn.

        It was used before, or is the upper part of a node that was. Entries of before are
        void.
        """
        ...

    def pop(self, num_blocks: int) -> tuple[Node, int] | None:
        """The node to evict from, and how many of its last blocks; None if there is none.

        The count is from 1 to `num_blocks`. The pool evicts just these; the rest of the node
        stays in the order. Nodes that are dead or held by now are passed over.
        """
        ...

    def forget(self, node: Node) -> None:
        """It has moved to another memory, with what is left of it: it is not ours any more."""
        ...

    def nodes(self) -> list[Node]:
        """Those that may be evicted. For audits."""
        ...


PolicyFactory = Callable[[int, IsHeld], EvictionPolicy]
"""A policy for a pool of so many blocks; the function tells whether a node has references."""
