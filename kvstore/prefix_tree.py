"""Which blocks hold the KV of which prefix: an exact radix tree over token blocks."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.types import BlockId, Namespace

TOKEN_BYTES = array("i").itemsize
_MOST_COMPARED = 64  # blocks that may follow a prefix, when one is searched that is alike


class Node:
    """A run of consecutive blocks that nothing branches off within.

    States: alive, dead (evicted; whoever remembers it looks again). `start` is the number
    of blocks before it. `data` are its tokens, `blocks` where their KV is. `stamp` and
    `record` are what the eviction policy knows of it. Whoever holds a block of it holds them
    all, since it is split where a match ends. All its blocks are in one memory; while it
    `is_arriving`, their contents are not there yet, and no match finds it.
    """

    __slots__ = (
        "blocks",
        "children",
        "data",
        "grower",
        "is_alive",
        "is_arriving",
        "parent",
        "record",
        "stamp",
        "start",
    )

    def __init__(
        self, parent: Node | None, start: int, blocks: array[int], data: bytearray
    ) -> None:
        self.parent, self.start = parent, start
        self.blocks, self.data = blocks, data
        self.children: dict[bytes, Node] = {}
        self.grower: Chain | None = None  # ends here and may append: it holds all, nobody else
        self.stamp = 0
        self.record: Any = None
        self.is_alive = True
        self.is_arriving = False

    @property
    def end(self) -> int:
        return self.start + len(self.blocks)


class Root(Node):
    """Where the prefixes of a namespace begin. Its number is no other living root's."""

    __slots__ = ("namespace", "number")

    def __init__(self, namespace: Namespace, number: int) -> None:
        super().__init__(None, 0, array("i"), bytearray())
        self.namespace, self.number = namespace, number


@dataclass(slots=True, eq=False)
class Chain:
    """How far a sequence's leading full blocks are in the tree: `num_blocks`, up to `node`.

    The node's blocks may be another sequence's, if that one wrote the same prefix first.
    """

    namespace: Namespace
    node: Node | None = None
    num_blocks: int = 0

    @property
    def is_alive(self) -> bool:
        """The node still stands for the same prefix."""
        node = self.node
        return node is None or (node.is_alive and node.end >= self.num_blocks)

    def restart(self) -> None:
        self.leave()
        self.node, self.num_blocks = None, 0

    def leave(self) -> None:
        """Append to the node no more: whoever comes back to it may not hold its blocks then,
        or others may."""
        if self.node is not None and self.node.grower is self:
            self.node.grower = None


class PrefixTree:
    """A tree per namespace. A child is found by the tokens of its first block, as bytes.

    Those are the dict's keys themselves, and the rest of a run is compared whole, so equal
    hashes can never make two prefixes the same.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_bytes = block_size * TOKEN_BYTES  # of its tokens
        # The node of each block; None if it is in none.
        self.owners: NDArray[Any] = np.full(num_blocks, None, object)
        self._roots: dict[Namespace, Root] = {}
        self._numbered: dict[int, Root] = {}
        self._free_numbers: list[int] = []
        self.split_nodes: list[Node] = []  # the new upper ones, for whoever orders the nodes
        self.new_roots: list[Root] = []  # for whoever writes them down

    @property
    def num_namespaces(self) -> int:
        return len(self._roots)

    def root(self, namespace: Namespace) -> Root:
        """The root of a namespace, which may be a new one."""
        root = self._roots.get(namespace)
        if root is None:
            free = self._free_numbers
            root = self.restore_root(namespace, free.pop() if free else len(self._numbered))
            self.new_roots.append(root)
        return root

    def restore_root(self, namespace: Namespace, number: int) -> Root:
        """The root of a namespace under the number that it had before."""
        root = self._roots[namespace] = self._numbered[number] = Root(namespace, number)
        return root

    def restored(self) -> None:
        """All roots are restored: the numbers between theirs are free."""
        used = self._numbered
        self._free_numbers = [n for n in range(max(used, default=0)) if n not in used]

    def restore(self, parent: Node, blocks: array[int], data: bytes) -> Node | None:
        """Put a run below a node as it was. None if there is one that begins alike."""
        first = data[: self.block_bytes]
        if first in parent.children:
            return None
        node = parent.children[first] = Node(parent, parent.end, blocks, bytearray(data))
        self._own(node, blocks)
        return node

    def namespace_of(self, number: int) -> Namespace:
        """Of a root that has children."""
        return self._numbered[number].namespace

    def roots(self) -> list[Root]:
        return list(self._roots.values())

    def find(self, namespace: Namespace, data: bytes) -> list[BlockId]:
        """The blocks of the longest prefix of whole blocks of `data`. Changes nothing."""
        found: list[BlockId] = []
        for node, count in self._walk(self._roots.get(namespace), data):
            found += node.blocks[:count]
        return found

    def match(self, namespace: Namespace, data: bytes) -> Chain:
        """The longest prefix of whole blocks of `data`, ready to be held."""
        chain = Chain(namespace)
        for node, count in self._walk(self._roots.get(namespace), data):
            if node.is_arriving:
                break
            whole = node if count == len(node.blocks) else self._split(node, count)
            # Its next blocks would not be held by those who hold it now.
            whole.grower = None
            chain.node, chain.num_blocks = whole, whole.end
        return chain

    def register(self, chain: Chain, data: bytes, blocks: array[int]) -> array[int]:
        """Move a living chain on by the blocks whose tokens are `data`.

        Returns those that are in the tree now, the last ones of `blocks`. For the others,
        the tree has had blocks of the same prefix before.
        """
        if not blocks:
            return blocks
        node = self._settle(chain)
        at, size = 0, self.block_bytes
        for child, count in self._walk(node, data):
            node = child if count == len(child.blocks) else self._split(child, count)
            at += count
        new = blocks[at:]
        if new:
            if node.grower is chain and not node.children:
                node.blocks.extend(new)
                node.data += data[at * size :]
                self._own(node, new)
            else:
                child = Node(node, node.end, new[:], bytearray(data[at * size :]))
                child.grower = chain
                self._own(child, new)
                node.children[data[at * size : (at + 1) * size]] = child
                node = child
        if chain.node is not node:
            chain.leave()
        chain.node = node
        chain.num_blocks = node.end
        return new

    def along(self, chain: Chain, data: bytes) -> list[tuple[Node, int]]:
        """What there is of `data` after a chain: nodes, and how many blocks of each."""
        return list(self._walk(self._settle(chain), data)) if data else []

    def upper_part(self, node: Node, count: int) -> Node:
        """The node of the first `count` blocks of a node, which is cut in two if need be."""
        return node if count == len(node.blocks) else self._split(node, count)

    def relocate(self, node: Node, blocks: array[int]) -> array[int]:
        """The contents of a node are in other blocks from now on; those they were in."""
        old, node.blocks = node.blocks, blocks[:]
        node.is_arriving = False
        node.grower = None
        self._own(None, old)
        self._own(node, node.blocks)
        return old

    def most_alike(self, chain: Chain, tokens: array[int]) -> tuple[BlockId, int]:
        """A block after the chain that begins like `tokens`, and how many of them it has.

        Not the best one if there are very many. (0, 0): there is none.
        """
        node = chain.node or self._roots.get(chain.namespace)
        nodes = [] if node is None else list(islice(node.children.values(), _MOST_COMPARED))
        nodes = [node for node in nodes if not node.is_arriving]
        if not nodes or not tokens:
            return 0, 0
        size = self.block_bytes
        firsts = np.frombuffer(b"".join(bytes(node.data[:size]) for node in nodes), np.int32)
        length = min(len(tokens), size // TOKEN_BYTES)
        alike = firsts.reshape(len(nodes), -1)[:, :length] == np.array(tokens[:length])
        counts = np.cumprod(alike, axis=1).sum(axis=1)
        best = int(counts.argmax())
        return nodes[best].blocks[0], int(counts[best])

    def number_of(self, node: Node) -> int:
        """The number of the root above a node."""
        while node.parent is not None:
            node = node.parent
        assert isinstance(node, Root)
        return node.number

    def path(self, chain: Chain) -> Iterator[Node]:
        """The nodes of a living chain, the last one first."""
        node = self._settle(chain) if chain.num_blocks else None
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    def retreat(self, chain: Chain, num_blocks: int) -> list[Node]:
        """Shorten a chain; the nodes it does not cover any more, the last one first."""
        left = [node for node in self.path(chain) if node.end > num_blocks]
        for node in left:
            # The chain may come back to it without holding its blocks.
            node.grower = None
        chain.num_blocks = num_blocks
        self._settle(chain)  # cuts the last of those in two, of which the lower one is left
        if not num_blocks:
            chain.node = None
        return left

    def separate(self, block_id: BlockId, num_blocks: int) -> None:
        """Let the node of a block begin no earlier than after `num_blocks` blocks."""
        node = self.owners[block_id]
        if node is not None and node.start < num_blocks:
            self._split(node, num_blocks - node.start)

    def freeze(self, chain: Chain) -> None:
        """What the chain's owner registers next begins a node: others hold this one too."""
        if chain.node is not None:
            chain.node.grower = None

    def trim(self, node: Node, count: int) -> array[int]:
        """Cut the last blocks off a node without children; the blocks, first one first."""
        cut = node.blocks[-count:]
        self._own(None, cut)
        if count == len(node.blocks):
            self._remove(node)
            return cut
        del node.blocks[-count:]
        del node.data[-count * self.block_bytes :]
        return cut

    def prune(self, node: Node) -> array[int]:
        """Cut off all that is below a node; the blocks."""
        cut = array("i")
        stack = list(node.children.values())
        node.children = {}
        while stack:
            child = stack.pop()
            child.is_alive = False
            cut += child.blocks
            stack += child.children.values()
        if cut:
            self._own(None, cut)
        return cut

    def tops(self) -> list[Node]:
        """The nodes that begin a prefix."""
        return [node for root in self._roots.values() for node in root.children.values()]

    def walk(self) -> Iterator[Node]:
        """All nodes that can be reached, without the roots. For audits."""
        stack = self.tops()
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def _walk(self, node: Node | None, data: bytes) -> Iterator[tuple[Node, int]]:
        """The nodes along `data` from below `node` on, and how many blocks of each match."""
        at, size = 0, self.block_bytes
        while node is not None and at < len(data):
            child = node.children.get(data[at : at + size])
            if child is None:
                return
            count = self._common(child.data, data[at : at + len(child.data)])
            is_whole = count == len(child.blocks)
            yield child, count
            if not is_whole:
                return
            at += count * size
            node = child

    def _common(self, ours: bytearray, theirs: bytes) -> int:
        """Whole blocks that two runs of tokens begin with alike."""
        if ours == theirs:
            return len(theirs) // self.block_bytes
        length = min(len(ours), len(theirs))
        a, b = (
            np.frombuffer(ours, np.uint64, length // 8),
            np.frombuffer(theirs, np.uint64, length // 8),
        )
        differs = a != b
        first = int(differs.argmax())
        if not differs[first]:
            return length // self.block_bytes
        return first * 8 // self.block_bytes

    def _settle(self, chain: Chain) -> Node:
        """The node that ends where the chain does; it may have to be cut out for that."""
        node = chain.node
        if node is None:
            return self.root(chain.namespace)
        while node.start >= chain.num_blocks and node.parent is not None:
            node = node.parent
        if node.end > chain.num_blocks:
            node = self._split(node, chain.num_blocks - node.start)
        chain.node = node
        return node

    def _split(self, node: Node, count: int) -> Node:
        """Cut a node in two; the new upper one has the first `count` blocks.

        Chains that end in the node stay true: it keeps the lower part.
        """
        parent, size = node.parent, self.block_bytes
        assert parent is not None
        upper = Node(parent, node.start, node.blocks[:count], node.data[: count * size])
        upper.stamp, upper.record = node.stamp, node.record
        upper.is_arriving = node.is_arriving
        parent.children[bytes(node.data[:size])] = upper
        del node.blocks[:count]
        del node.data[: count * size]
        node.start += count
        node.parent = upper
        upper.children[bytes(node.data[:size])] = node
        self._own(upper, upper.blocks)
        self.split_nodes.append(upper)
        return upper

    def _own(self, node: Node | None, blocks: array[int]) -> None:
        self.owners[np.array(blocks, np.int32)] = node

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        node.is_alive = False
        del parent.children[bytes(node.data[: self.block_bytes])]
        if isinstance(parent, Root) and not parent.children:
            del self._roots[parent.namespace]
            del self._numbered[parent.number]
            self._free_numbers.append(parent.number)
