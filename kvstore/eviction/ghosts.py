"""Memory of blocks that were evicted, without their KV."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, NamedTuple, TypeVar

from kvstore.prefix_tree import Node

T = TypeVar("T")


class Ghost(NamedTuple, Generic[T]):
    """A run of blocks that was evicted: how many, what was known of it, which its middle is."""

    num_blocks: int
    known: T
    middle: int


class Ghosts(Generic[T]):
    """The runs of blocks that were evicted last, each found by its first block.

    A block is recognised by its tokens and where it stood, without the tokens before it.
    Two blocks may be taken for one by that, which costs a policy some precision and nobody
    any KV. Not more than `limit` runs are kept; the oldest are forgotten first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._runs: OrderedDict[int, Ghost[T]] = OrderedDict()

    def add(self, node: Node, count: int, known: T) -> None:
        """Remember the last `count` blocks of a node, which are about to be evicted."""
        first = len(node.blocks) - count
        key = _key(node, first)
        self._runs[key] = Ghost(count, known, _key(node, first + count // 2))
        self._runs.move_to_end(key)
        if len(self._runs) > self._limit:
            self._runs.popitem(last=False)

    def find(self, node: Node, index: int = 0) -> Ghost[T] | None:
        """The run that began like the block at `index` of a node, if its middle is there too.

        The last blocks of a prompt are often not the same when it returns.
        """
        ghost = self._runs.get(_key(node, index))
        if ghost is None:
            return None
        middle = index + ghost.num_blocks // 2
        if middle >= len(node.blocks) or _key(node, middle) != ghost.middle:
            return None
        return ghost


def _key(node: Node, index: int) -> int:
    size = len(node.data) // len(node.blocks)
    return hash((node.start + index, bytes(node.data[index * size : (index + 1) * size])))
