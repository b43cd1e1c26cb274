"""Memory of blocks that were evicted, without their KV."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from kvstore.prefix_tree import Node

T = TypeVar("T")


class Ghosts(Generic[T]):
    """What was known of evicted blocks, the last ones of them.

    A block is recognised by its tokens and where it stood, without the tokens before it.
    Two blocks may be taken for one by that, which costs a policy some precision and nobody
    any KV. Not more than `limit` are kept, the oldest are forgotten first.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: OrderedDict[int, T] = OrderedDict()

    def add(self, node: Node, index: int, known: T) -> None:
        """Remember the block at `index` of a node."""
        key = _key(node, index)
        self._known[key] = known
        self._known.move_to_end(key)
        if len(self._known) > self._limit:
            self._known.popitem(last=False)

    def find(self, node: Node, index: int) -> T | None:
        """What was known of a block that equals the one at `index` of a node."""
        return self._known.get(_key(node, index))


def _key(node: Node, index: int) -> int:
    size = len(node.data) // len(node.blocks)
    return hash((node.start + index, bytes(node.data[index * size : (index + 1) * size])))
