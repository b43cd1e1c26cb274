"""The radix tree against a plain list of the prefixes that were registered."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from kvstore.prefix_tree import Chain, PrefixTree
from kvstore.types import Namespace

SIZE = 2  # tokens per block; the tree itself takes any even number
SPACE, OTHER = Namespace(b"m"), Namespace(b"m", salt="s")

# Few kinds of blocks, so that prefixes are often shared; 0 and 1 differ in the last token only.
paths = st.lists(st.integers(0, 2), max_size=6).map(tuple)


def data_of(path) -> bytes:
    return array("i", [token for kind in path for token in (7, kind)]).tobytes()


class Plain:
    """Which block stands for which prefix: the first one that was registered for it."""

    def __init__(self):
        self.blocks = {}
        self.num_blocks = 0

    def new_blocks(self, count):
        first, self.num_blocks = self.num_blocks, self.num_blocks + count
        return array("i", range(first, self.num_blocks))

    def register(self, path, start, blocks):
        new = []
        for position, block in enumerate(blocks, start=start):
            if self.blocks.setdefault(path[: position + 1], block) == block:
                new.append(block)
        return new

    def find(self, path):
        found = []
        for position in range(len(path)):
            block = self.blocks.get(path[: position + 1])
            if block is None:
                break
            found.append(block)
        return found


@given(st.lists(st.tuples(paths, st.lists(st.integers(0, 6), max_size=3)), max_size=8), paths)
def test_it_finds_what_a_plain_dict_finds(registrations, question):
    tree, plain = PrefixTree(400, SIZE), Plain()
    chains = []
    for path, cuts in registrations:
        chain = Chain(SPACE)
        chains.append((chain, path))
        for end in sorted({*cuts, len(path)}):
            part = path[chain.num_blocks : end]
            blocks = plain.new_blocks(len(part))
            start = chain.num_blocks
            new = tree.register(chain, data_of(part), blocks)
            assert list(new) == plain.register(path, start, blocks)
            assert chain.num_blocks == start + len(part)
            assert tree.find(SPACE, data_of(question)) == plain.find(question)
        for other, whole in chains:  # older ones stay true when nodes are split or grow
            assert other.is_alive
            along = [b for node in reversed(list(tree.path(other))) for b in node.blocks]
            assert along == plain.find(whole)
    matched = tree.match(SPACE, data_of(question))
    assert matched.num_blocks == len(plain.find(question))
    assert tree.find(OTHER, data_of(question)) == []


def test_blocks_that_follow_a_match_begin_a_node_of_their_own():
    """Or whoever holds the match would hold them too."""
    tree = PrefixTree(400, SIZE)
    first = Chain(SPACE)
    tree.register(first, data_of((1,)), array("i", [0]))
    matched = tree.match(SPACE, data_of((1,)))
    tree.register(first, data_of((2,)), array("i", [1]))
    assert list(matched.node.blocks) == [0]
    assert list(first.node.blocks) == [1]


def test_blocks_of_one_sequence_stay_one_node():
    tree = PrefixTree(400, SIZE)
    chain = Chain(SPACE)
    for number in range(5):
        tree.register(chain, data_of((number % 3,)), array("i", [number]))
    assert [list(node.blocks) for node in tree.walk()] == [[0, 1, 2, 3, 4]]


def test_a_trimmed_node_ends_the_chains_that_went_on_in_it():
    tree = PrefixTree(400, SIZE)
    long, short = Chain(SPACE), Chain(SPACE)
    tree.register(long, data_of((0, 1, 2)), array("i", [0, 1, 2]))
    tree.register(short, data_of((0,)), array("i", [3]))
    node = long.node
    assert list(tree.trim(node, 1)) == [2]
    assert not long.is_alive
    assert short.is_alive
    assert tree.find(SPACE, data_of((0, 1, 2))) == [0, 1]
    assert list(tree.trim(node, 1)) == [1]
    assert not node.is_alive


def test_pruning_takes_all_that_is_below():
    tree = PrefixTree(400, SIZE)
    for number, path in enumerate([(0,), (0, 1), (0, 2), (0, 2, 1)]):
        blocks = array("i", range(10 * number, 10 * number + len(path)))
        tree.register(Chain(SPACE), data_of(path), blocks)
    node = tree.match(SPACE, data_of((0,))).node
    assert sorted(tree.prune(node)) == [11, 21, 32]
    assert tree.find(SPACE, data_of((0, 2, 1))) == [0]


def test_a_namespace_goes_with_its_last_block():
    tree = PrefixTree(400, SIZE)
    chain = Chain(SPACE)
    tree.register(chain, data_of((1, 2)), array("i", [0, 1]))
    assert tree.num_namespaces == 1
    tree.trim(chain.node, 2)
    assert tree.num_namespaces == 0
    again = Chain(SPACE)
    tree.register(again, data_of((1,)), array("i", [5]))
    assert tree.find(SPACE, data_of((1, 2))) == [5]
