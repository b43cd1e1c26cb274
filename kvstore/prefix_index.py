"""Which block holds the KV of which prefix: an exact trie."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.types import BlockId, Namespace

_ROOT = -1


@dataclass(slots=True)
class Chain:
    """How far a sequence's leading full blocks are in the index.

    `node` is the block that stands there for the last of `num_blocks`; another
    sequence's, if that one wrote the same prefix first. `stamp` tells whether the node
    still means what it meant.
    """

    namespace: Namespace
    num_blocks: int = 0
    node: BlockId = _ROOT
    stamp: int = 0

    def restart(self) -> None:
        self.num_blocks, self.node, self.stamp = 0, _ROOT, 0


class PrefixIndex:
    """A trie per namespace; an edge is the tokens of one full block, a node is a block.

    Edges are dict keys that hold the tokens themselves, and each level descends from one
    exact parent, so equal hashes can never make two prefixes the same.
    Invariant: the parent of a node is a node, or the root.
    """

    def __init__(self, num_blocks: int) -> None:
        self._roots: dict[Namespace, dict[bytes, BlockId]] = {}
        self._children: list[dict[bytes, BlockId] | None] = [None] * num_blocks
        # Where a node's own edge is: in which dict, under which key, below which parent.
        self._home: list[dict[bytes, BlockId] | None] = [None] * num_blocks
        self._key = [b""] * num_blocks
        self._parent = [_ROOT] * num_blocks
        self._stamps = [0] * num_blocks
        self._namespaces: dict[BlockId, Namespace] = {}  # of nodes right below a root

    def match(self, namespace: Namespace, keys: list[bytes]) -> list[BlockId]:
        """The blocks of the longest indexed prefix of `keys`."""
        found: list[BlockId] = []
        level = self._roots.get(namespace)
        for key in keys:
            node = level.get(key) if level else None
            if node is None:
                break
            found.append(node)
            level = self._children[node]
        return found

    def chain(self, namespace: Namespace, node_path: list[BlockId]) -> Chain:
        """A chain that ends at the last node of a path from the root."""
        if not node_path:
            return Chain(namespace)
        node = node_path[-1]
        return Chain(namespace, len(node_path), node, self._stamps[node])

    def is_alive(self, chain: Chain) -> bool:
        """The chain's node still stands for the same prefix."""
        if not chain.num_blocks:
            return True
        return self._home[chain.node] is not None and self._stamps[chain.node] == chain.stamp

    def advance(self, chain: Chain, key: bytes, block_id: BlockId) -> bool:
        """Move a living chain one block on; True if `block_id` became its new node.

        False means that a node for these tokens was there already.
        """
        level = self._level(chain)
        node = level.setdefault(key, block_id)
        is_new = node == block_id and self._home[block_id] is None
        if is_new:
            self._home[block_id] = level
            self._key[block_id] = key
            self._parent[block_id] = chain.node if chain.num_blocks else _ROOT
            self._stamps[block_id] += 1
            if not chain.num_blocks:
                self._namespaces[block_id] = chain.namespace
        chain.num_blocks += 1
        chain.node = node
        chain.stamp = self._stamps[node]
        return is_new

    def parent(self, node: BlockId) -> BlockId:
        """The node one block before; a negative number for the first block of a prefix."""
        return self._parent[node]

    def remove(self, node: BlockId) -> list[BlockId]:
        """Remove a node and all that is only reachable through it; the removed nodes."""
        self._cut(node)
        removed = [node]
        for current in removed:  # grows while we walk: breadth first
            children = self._children[current]
            if children:
                removed.extend(children.values())
            self._children[current] = None
            self._home[current] = None
            self._key[current] = b""
            self._parent[current] = _ROOT
        return removed

    def walk(self) -> list[tuple[BlockId, BlockId, bytes]]:
        """All (node, parent, key) that can be reached from the roots. For audits."""
        edges: list[tuple[BlockId, BlockId, bytes]] = []
        levels = [(_ROOT, level) for level in self._roots.values()]
        for parent, level in levels:
            for key, node in level.items():
                edges.append((node, parent, key))
                levels.append((node, self._children[node] or {}))
        return edges

    @property
    def num_namespaces(self) -> int:
        return len(self._roots)

    def _level(self, chain: Chain) -> dict[bytes, BlockId]:
        if not chain.num_blocks:
            return self._roots.setdefault(chain.namespace, {})
        level = self._children[chain.node]
        if level is None:
            level = self._children[chain.node] = {}
        return level

    def _cut(self, node: BlockId) -> None:
        level = self._home[node]
        if level is None:
            raise ValueError(f"block {node} is not in the index")
        del level[self._key[node]]
        namespace = self._namespaces.pop(node, None)
        parent = self._parent[node]
        if level:
            return
        if namespace is not None:
            del self._roots[namespace]
        elif parent != _ROOT:
            self._children[parent] = None
