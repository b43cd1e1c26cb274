"""Least hit density: what is least likely to return for the time it would be kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.eviction.ghosts import Ghosts
from kvstore.eviction.leaf_heap import LeafHeap
from kvstore.eviction.policy import IsHeld
from kvstore.eviction.return_rates import Feature, Kind, ReturnRates
from kvstore.eviction.tails import Tails
from kvstore.prefix_tree import Node

# Ages grow by half an octave from a sixteenth of the pool to 45 pools that passed through it.
_NUM_AGES = 20
_FIRST_AGE = 16
# Returns are learnt from the first sequences, then from one of so many.
_FIRST_OBSERVED, _OBSERVED_PART = 16_384, 4
_MOST_OBSERVED = 16_384
_LEAST_CHANGE = 1 / 16  # of a density, for which nodes are ordered anew
_FEWEST_GHOSTS = 32_768
# Less of it than this part is a template that prompts share, and no return.
_RETURNED_PART = 0.25


@dataclass(slots=True, eq=False)
class _Visit:
    """A sequence that left, and the nodes that it was the last one to use.

    `time` is when it left, `age` the number of the age that it is in now, and `density` that
    by which its nodes are ordered, one of the `densities` of its ages. `left` is
    the part of it that has not come back. The last `num_tail` blocks of `tail` are expected
    not to.
    """

    kind: Kind
    densities: list[float]
    density: float
    turn: int
    time: int
    end: int
    num_blocks: int
    nodes: dict[Node, None]  # an ordered set
    tail: Node | None
    num_tail: int
    is_observed: bool
    age: int = 0
    left: float = 1.0

    def let_go(self, node: Node) -> None:
        """The node is evicted or another visit's. Ghosts outlive it; its tokens need not."""
        self.nodes.pop(node, None)
        if self.tail is node:
            self.tail = None


class Lhd:
    """The lowest hit density first: returns to expect per block and time it is kept for them.

    What is known of a prompt are the turn of its conversation, the time since the turn
    before, its length and how much of it was new. ReturnRates learns what these say about a
    return, from all that come back, evicted or not: what was evicted is remembered as ghosts.
    Time is counted in blocks of the sequences that leave.

    Source: Beckmann et al. 2018, LHD: Improving cache hit rate by maximizing hit density
    (NSDI '18). Classes there are learnt one by one; here they share what is known of each
    feature, and all nodes of a sequence have one age.
    """

    def __init__(self, num_blocks: int, is_held: IsHeld) -> None:
        self._is_held = is_held
        self._heap = LeafHeap(is_held)
        self._unit = max(1, num_blocks)
        first = max(4.0, num_blocks / _FIRST_AGE)
        self._edges = [0, *(round(first * 2 ** (age / 2)) for age in range(_NUM_AGES))]
        self._rates = ReturnRates(self._edges)
        self._tails = Tails()
        self._ghosts: Ghosts[_Visit] = Ghosts(max(_FEWEST_GHOSTS, num_blocks // 4))
        self._ages: list[deque[_Visit]] = [deque() for _ in range(_NUM_AGES)]
        self._clock = 0
        self._num_visits = self._num_observed = 0

    def use(self, nodes: Sequence[Node]) -> None:
        """A sequence leaves. What others hold of it is theirs: it will be their visit."""
        self._clock += sum(len(node.blocks) for node in nodes)
        self._grow_older()
        nodes = [node for node in nodes if not self._is_held(node)]
        if not nodes:
            return
        returned, last, depth = self._find_returned(nodes)
        for visit, count in returned.items():
            self._learn_return(visit, count)
        size = sum(len(node.blocks) for node in nodes)
        end = max(node.end for node in nodes)
        turn = 0
        features: tuple[Feature, ...] = (("turn", 0), ("first length", end.bit_length()))
        if last is not None and 2 * depth > last.end:
            turn, features = self._next_turn(last, depth, end)
        is_observed = self._observes()
        tail = nodes[0]
        kind = self._rates.kind(features)
        densities = self._rates.densities(kind)
        visit = _Visit(
            kind=kind,
            densities=densities,
            density=densities[0],
            turn=turn,
            time=self._clock,
            end=end,
            num_blocks=size,
            nodes=dict.fromkeys(nodes),
            tail=tail,
            num_tail=min(self._tails.size, len(tail.blocks)),
            is_observed=is_observed,
        )
        for node in nodes:
            if node.record is not None:
                node.record.let_go(node)
            node.record = visit
        self._ages[0].append(visit)

    def push(self, node: Node) -> None:
        """See EvictionPolicy."""
        visit: _Visit = node.record
        visit.nodes[node] = None
        self._heap.push(node, self._density(node, visit))

    def pop(self, num_blocks: int) -> tuple[Node, int] | None:
        """See EvictionPolicy."""
        shown = self._heap.peek()
        if shown is None:
            return None
        node = shown[0]
        visit: _Visit = node.record
        size = len(node.blocks)
        count = min(num_blocks, size)
        is_tail = node is visit.tail and visit.num_tail > 0
        if is_tail:
            count = min(count, visit.num_tail)
            visit.num_tail -= count
        self._ghosts.add(node, count, visit)
        if count == size:
            self._heap.take()
            visit.let_go(node)
        elif is_tail and not visit.num_tail:
            self._heap.push(node, self._density(node, visit))
        return node, count

    def forget(self, node: Node) -> None:
        """See EvictionPolicy. If it comes back, that is a return of its visit."""
        self._heap.forget(node)
        node.record.let_go(node)

    def nodes(self) -> list[Node]:
        """See EvictionPolicy."""
        return self._heap.nodes()

    def _observes(self) -> bool:
        """Whether to learn from the next visit."""
        self._num_visits += 1
        if self._num_visits > _FIRST_OBSERVED and self._num_visits % _OBSERVED_PART:
            return False
        if self._num_observed == _MOST_OBSERVED:
            return False
        self._num_observed += 1
        return True

    def _density(self, node: Node, visit: _Visit) -> float:
        is_tail = node is visit.tail and visit.num_tail
        return visit.density * self._tails.share if is_tail else visit.density

    def _next_turn(self, last: _Visit, depth: int, end: int) -> tuple[int, tuple[Feature, ...]]:
        turn = last.turn + 1
        gap = (64 * (self._clock - last.time) // self._unit).bit_length()
        return turn, (
            ("turn", min(turn, 3) if turn < 5 else 4),
            ("gap", gap),
            ("new", (end - depth).bit_length()),
            ("length", end.bit_length()),
        )

    def _find_returned(self, nodes: Sequence[Node]) -> tuple[dict[_Visit, int], _Visit | None, int]:
        """Whose blocks these are again, and how many; the deepest one, and where that ends."""
        returned: dict[_Visit, int] = {}
        last, depth, is_evicted = None, 0, False
        for node in nodes:
            visit: _Visit | None = node.record
            if visit is not None:
                returned[visit] = returned.get(visit, 0) + len(node.blocks)
                if last is None:
                    last, depth = visit, node.end
                continue
            # Where a prompt that returns goes on, something was evicted last; what was
            # evicted before that comes next.
            index, deepest = 0, None
            while index < len(node.blocks) and (ghost := self._ghosts.find(node, index)):
                deepest = ghost.known
                index = min(index + ghost.num_blocks, len(node.blocks))
                returned[deepest] = returned.get(deepest, 0) + ghost.num_blocks
            if deepest is not None:
                is_evicted = True
                if last is None:
                    last, depth = deepest, node.start + index
        if last is not None and 2 * depth > last.end:
            self._tails.learn(0 if is_evicted else last.end - depth)
        return returned, last, depth

    def _learn_return(self, visit: _Visit, count: int) -> None:
        part = min(visit.left, count / visit.num_blocks)
        visit.left -= part
        if visit.is_observed and part >= _RETURNED_PART:
            self._rates.learn(visit.kind, visit.age, part, part)

    def _grow_older(self) -> None:
        """Let visits go on to the ages they are in by now, and order their nodes anew."""
        for age, queue in enumerate(self._ages):
            end = self._edges[age + 1]
            while queue and queue[0].time + end <= self._clock:
                visit = queue.popleft()
                if visit.is_observed:
                    self._rates.learn(visit.kind, age, visit.left, 0.0)
                visit.age = age + 1
                if visit.nodes:
                    self._reorder(visit)
                if visit.age < _NUM_AGES and (visit.nodes or visit.is_observed):
                    self._ages[visit.age].append(visit)
                elif visit.is_observed:
                    visit.is_observed = False
                    self._num_observed -= 1

    def _reorder(self, visit: _Visit) -> None:
        density = visit.densities[visit.age]
        if abs(density - visit.density) <= _LEAST_CHANGE * visit.density:
            return
        visit.density = density
        for node in visit.nodes:
            if node.is_alive and not self._is_held(node):
                self._heap.push(node, self._density(node, visit))
