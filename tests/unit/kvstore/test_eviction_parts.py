"""The parts that eviction policies are made of."""

from __future__ import annotations

from array import array

import pytest

from kvstore.eviction.ghosts import Ghosts
from kvstore.eviction.leaf_heap import LeafHeap
from kvstore.eviction.return_rates import ReturnRates
from kvstore.eviction.tails import Tails
from kvstore.prefix_tree import Node

SIZE = 8


def node_of(*kinds: int, start: int = 0, parent: Node | None = None) -> Node:
    data = array("i", [kind for kind in kinds for _ in range(SIZE)]).tobytes()
    node = Node(parent, start, array("i", kinds), bytearray(data))
    if parent is not None:
        parent.children[data[: 4 * SIZE]] = node
    return node


# --- LeafHeap


def test_the_lowest_leaf_is_next_and_a_node_waits_for_those_below_it():
    held: set[Node] = set()
    heap = LeafHeap(lambda node: node in held)
    above = node_of(1)
    below, other = node_of(2, start=1, parent=above), node_of(3)
    heap.push(above, 1.0)
    heap.push(below, 3.0)
    heap.push(other, 2.0)
    assert heap.peek() == (other, 2.0)
    heap.take()
    assert set(heap.nodes()) == {above, below}
    assert heap.peek() == (below, 3.0)
    heap.take()
    above.children.clear()
    assert heap.peek() == (above, 1.0)


def test_a_node_does_not_wait_for_what_is_held_below_it():
    held: set[Node] = set()
    heap = LeafHeap(lambda node: node in held)
    above = node_of(1)
    held.add(node_of(2, start=1, parent=above))
    heap.push(above, 1.0)
    assert heap.peek() == (above, 1.0)


def test_a_node_that_moved_or_is_held_or_dead_is_passed_over():
    held: set[Node] = set()
    heap = LeafHeap(lambda node: node in held)
    moved, taken, dead = node_of(1), node_of(2), node_of(3)
    for node in (moved, taken, dead):
        heap.push(node, 1.0)
    heap.push(moved, 9.0)
    held.add(taken)
    dead.is_alive = False
    assert heap.nodes() == [moved]
    assert heap.peek() == (moved, 9.0)


def test_entries_that_were_left_behind_are_dropped():
    heap = LeafHeap(lambda node: False)
    node = node_of(1)
    for priority in range(5000):
        heap.push(node, float(priority))
    assert len(heap._heap) < 2000
    assert heap.peek() == (node, 4999.0)


# --- Ghosts


def test_a_run_is_found_by_its_first_block_at_its_place():
    ghosts: Ghosts[str] = Ghosts(10)
    ghosts.add(node_of(1, 2, 3, 4, 5), 3, "known")
    ghost = ghosts.find(node_of(3, 4, 9, start=2))
    assert (ghost.num_blocks, ghost.known) == (3, "known")
    assert ghosts.find(node_of(0, 0, 3, 4, 9), 2) is not None
    assert ghosts.find(node_of(3, 4, 5)) is None  # at the beginning of a prompt
    assert ghosts.find(node_of(3, 9, 5, start=2)) is None  # another one from its middle on
    assert ghosts.find(node_of(3, start=2)) is None


def test_the_oldest_runs_are_forgotten():
    ghosts: Ghosts[int] = Ghosts(2)
    for kind in (1, 2, 1, 3):
        ghosts.add(node_of(kind), 1, kind)
    assert [ghosts.find(node_of(kind)) is not None for kind in (1, 2, 3)] == [True, False, True]


# --- Tails


def test_a_tail_is_what_more_than_half_of_the_returns_leave_over():
    tails = Tails()
    for number in range(100):
        tails.learn(5 if number % 10 else 0)
    assert tails.size == 4
    assert tails.share == pytest.approx(1 - 90 / 108)
    for _ in range(400):
        tails.learn(0)
    assert (tails.size, tails.share) == (0, 1.0)


def test_a_few_returns_do_not_make_a_tail():
    tails = Tails()
    for _ in range(5):
        tails.learn(3)
    assert tails.size == 0


# --- ReturnRates

A, B = (("turn", 0),), (("turn", 1),)
EDGES = [0, 10, 20, 40, 80]


def learn(rates: ReturnRates, features, returned: list[float], count: int) -> None:
    """Prompts of a kind, of which such a part returned in each age."""
    for _ in range(count):
        left = 1.0
        for age, part in enumerate(returned):
            rates.learn(rates.kind(features), age, left, part)
            left -= part


def densities(rates: ReturnRates, features) -> list[float]:
    return rates.densities(rates.kind(features))


def test_without_evidence_what_left_last_is_the_densest():
    found = densities(ReturnRates(EDGES), A)
    assert found == sorted(found, reverse=True)
    assert found[-1] == 0.0


def test_a_kind_that_returns_more_often_is_denser():
    rates = ReturnRates(EDGES)
    learn(rates, A, [0.1, 0.1, 0.0, 0.0], 300)
    learn(rates, B, [0.3, 0.3, 0.0, 0.0], 300)
    a, b = densities(rates, A), densities(rates, B)
    assert b[0] > 2 * a[0]
    assert b[1] > 2 * a[1]


def test_the_density_is_the_best_over_all_ages_until_which_it_could_be_kept():
    rates = ReturnRates(EDGES)
    learn(rates, A, [0.0, 0.5, 0.0, 0.0], 2000)
    young, due, late, *_ = densities(rates, A)
    # About, as the first ones were counted by what was assumed before there was evidence.
    # Half of them return on the way to 20; those left spend 10 + 10 * (1 - 0.5 / 2) for it.
    assert young == pytest.approx(0.5 / 17.5, rel=0.1)
    assert due == pytest.approx(0.5 / 7.5, rel=0.1)
    assert late < due / 100


def test_a_kind_with_little_evidence_is_taken_for_like_the_others():
    rates = ReturnRates(EDGES)
    learn(rates, A, [0.2, 0.2, 0.1, 0.0], 300)
    before = densities(rates, A)[0]
    assert densities(rates, (("turn", 9),))[0] == pytest.approx(before, rel=0.3)


def test_a_gap_acts_at_each_age_on_its_own():
    rates = ReturnRates(EDGES)
    learn(rates, (("gap", 1),), [0.4, 0.0, 0.0, 0.0], 500)
    learn(rates, (("gap", 2),), [0.0, 0.0, 0.4, 0.0], 500)
    soon, late = densities(rates, (("gap", 1),)), densities(rates, (("gap", 2),))
    assert soon[0] > late[0]
    assert soon[2] < late[2]
