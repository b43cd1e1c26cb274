"""Consecutive blocks of the prefix tree, taken down for later."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from kvstore.prefix_tree import Chain, Node, PrefixTree, Root
from kvstore.types import BlockId, Namespace


@dataclass(slots=True)
class BlockRun:
    """Blocks, their tokens, and the block before them: their namespace if there is none."""

    before: BlockId | Namespace
    block_ids: array[int]
    token_data: bytes
    is_arriving: bool = False  # they cannot be found yet


def end_of_chain(chain: Chain, block_ids: array[int], token_data: bytes) -> BlockRun:
    """The last blocks of a chain that was just moved on by them."""
    node = chain.node
    assert node is not None
    index = node.end - len(block_ids) - node.start
    before = node.blocks[index - 1] if index else _above(node)
    return BlockRun(before, block_ids, token_data)


class TreeWalk:
    """One walk through a prefix tree that may change between two steps.

    Every block that is in the tree all the time is reported, once, and after the block
    before it. Blocks that come or go meanwhile are reported or not.
    """

    def __init__(self, tree: PrefixTree, num_blocks: int) -> None:
        self._is_seen = np.zeros(num_blocks, np.bool_)
        self._stack = tree.tops()

    def step(self) -> BlockRun | None:
        """The next run; None at the end."""
        while self._stack:
            node = self._stack.pop()
            # A node that we remembered may have been split since: it kept the lower part,
            # and that may be gone, while the upper one is still there.
            while not node.is_alive and node.parent is not None:
                node = node.parent
            if not node.blocks or self._is_seen[node.blocks[0]]:
                continue
            parent = node.parent
            if parent and parent.blocks and not self._is_seen[parent.blocks[0]]:
                self._stack.append(parent)  # it comes first, and has this one below it
                continue
            self._stack += node.children.values()
            run = BlockRun(_above(node), node.blocks[:], bytes(node.data), node.is_arriving)
            self._is_seen[np.array(run.block_ids, np.int32)] = True
            return run
        return None


def _above(node: Node) -> BlockId | Namespace:
    parent = node.parent
    assert parent is not None
    return parent.namespace if isinstance(parent, Root) else parent.blocks[-1]
