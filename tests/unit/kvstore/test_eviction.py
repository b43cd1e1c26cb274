"""What each eviction policy keeps and lets go of, in a small pool."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace

import pytest

from kvstore import audit
from kvstore.attachment import ManagerOptions
from kvstore.block_pool import BlockPool
from kvstore.errors import InvalidRequest
from kvstore.eviction import POLICIES
from kvstore.fakes import FakeStorage
from kvstore.frame_records import FrameRecords, size_bytes
from kvstore.manager import PageManager
from kvstore.types import Namespace

SPACE = Namespace(b"m")
SIZE = 8  # tokens of a block

every_policy = pytest.mark.parametrize("policy", list(POLICIES))


def data_of(blocks) -> bytes:
    return array("i", [block for block in blocks for _ in range(SIZE)]).tobytes()


class Cache:
    """A pool whose prompts come one after the other; a prompt is a sequence of numbers."""

    def __init__(self, num_blocks: int, policy: str) -> None:
        memory = memoryview(bytearray(size_bytes(num_blocks, SIZE)))
        self.pool = BlockPool(FrameRecords(num_blocks, SIZE, memory), eviction=policy)
        self.tenant = self.pool.tenants.get("")

    def run(self, *blocks: int) -> int:
        """Compute a prompt, and leave; how many of its blocks were there."""
        chain, hits = self.pool.match(SPACE, data_of(blocks))
        self.pool.hold(hits, self.tenant)
        new = self.pool.allocate(len(blocks) - len(hits), self.tenant)
        self.pool.refresh(chain)
        self.pool.register(chain, new, data_of(blocks[len(hits) :]))
        self.pool.release(chain, hits + new)
        return len(hits)

    def findings(self) -> list[str]:
        state = SimpleNamespace(blocks=self.pool)
        parts = (audit._free_lists, audit._tree, audit._queues)
        return [finding for part in parts for finding in part(state)]

    def has(self, *blocks: int) -> int:
        """Leading blocks that would be found."""
        return len(self.pool.tree.find(SPACE, data_of(blocks)))


def some_prompts(count: int) -> list[tuple[int, ...]]:
    """Conversations that go on now and then, below two system prompts."""
    draw = random.Random(7)
    open_ones, prompts, names = [], [], iter(range(100, 100_000))
    for _ in range(count):
        if open_ones and draw.random() < 0.5:
            prompt = open_ones.pop(draw.randrange(len(open_ones)))
        else:
            prompt = draw.choice([(1,), (2, 3)])
        prompt += tuple(next(names) for _ in range(draw.randint(1, 5)))
        prompts.append(prompt)
        if len(prompt) < 20:
            open_ones.append(prompt)
    return prompts


@every_policy
def test_what_remains_of_a_prompt_is_its_beginning(policy):
    cache = Cache(8, policy)
    cache.run(1, 2, 3, 4, 5, 6)
    cache.run(11, 12, 13, 14)
    assert cache.has(1, 2, 3, 4, 5, 6) + cache.has(11, 12, 13, 14) == 8
    assert cache.pool.evictions.total() == 2


@every_policy
def test_a_shared_beginning_stays_as_long_as_what_is_below_it(policy):
    cache = Cache(8, policy)
    for number in range(10, 40):
        cache.run(1, 2, number, number + 100)
        assert cache.has(1, 2) == 2
    assert cache.findings() == []


@every_policy
def test_the_books_are_right_after_many_prompts_and_a_replay_hits_the_same(policy):
    first, second = Cache(60, policy), Cache(60, policy)
    for prompt in some_prompts(600):
        assert first.run(*prompt) == second.run(*prompt)
    assert first.findings() == []
    assert first.pool.evictions.total() > 500


@every_policy
def test_what_is_held_is_never_evicted(policy):
    cache = Cache(6, policy)
    cache.run(1, 2, 3)
    chain, hits = cache.pool.match(SPACE, data_of((1, 2)))
    cache.pool.hold(hits, cache.tenant)
    for number in range(10, 20):
        cache.run(number, number + 100, number + 200)
    assert cache.has(1, 2) == 2
    cache.pool.release(chain, hits)
    assert cache.findings() == []


def test_gdsf_keeps_what_is_used_often_but_not_for_ever():
    cache = Cache(8, "gdsf")
    for _ in range(3):
        cache.run(1, 2)
    for number in range(10, 18):
        cache.run(number, number + 100)
    assert cache.has(1, 2) == 2  # LRU would have evicted it long ago
    for number in range(20, 60):
        cache.run(number, number + 100)
    assert cache.has(1, 2) == 0


def test_gdsf_keeps_what_is_dear_to_recompute():
    cache = Cache(1100, "gdsf")
    deep = tuple(range(1000))
    cache.run(*deep)
    cache.run(*deep, 5000)  # a node of its own, 1000 blocks deep
    for number in range(6000, 6100):
        cache.run(number)
    assert cache.has(*deep, 5000) == 1001


def test_s3_fifo_keeps_what_was_used_twice_when_many_newcomers_pass():
    cache = Cache(20, "s3-fifo")
    for _ in range(2):
        cache.run(1, 2, 3)
    for number in range(10, 60):
        cache.run(number)
    assert cache.has(1, 2, 3) == 3


def test_s3_fifo_lets_a_newcomer_stay_that_it_had_evicted():
    cache = Cache(20, "s3-fifo")
    cache.run(1, 2)
    for number in range(10, 30):
        cache.run(number)
    assert cache.has(1, 2) == 0
    cache.run(1, 2)
    for number in range(40, 90):
        cache.run(number)
    assert cache.has(1, 2) == 2


def two_kinds(cache: Cache, count: int) -> int:
    """Hits of short prompts that return after a while, among long ones that never do."""
    num_hits = 0
    for number in range(count):
        cache.run(*range(1000 * number, 1000 * number + 12))
        cache.run(500_000 + number, 600_000 + number)
        if number >= 8:
            num_hits += cache.run(500_000 + number - 8, 600_000 + number - 8)
    return num_hits


def test_lhd_learns_which_prompts_return():
    """LRU finds none of them: 8 rounds of 14 blocks pass before they return."""
    assert two_kinds(Cache(60, "lru"), 400) == 0
    learned = two_kinds(Cache(60, "lhd"), 400)
    assert learned > 500  # of 784


def test_lhd_forgets_visits_in_the_end():
    cache = Cache(4, "lhd")
    policy = cache.tenant.partition.queue
    counts = []
    for number in range(6000):
        cache.run(number, number + 10_000)
        if number % 2000 == 1999:
            counts.append(sum(map(len, policy._ages)))
    assert counts[1] == counts[2]
    assert policy._num_observed == sum(visit.is_observed for q in policy._ages for visit in q)


def test_an_unknown_policy_is_refused():
    with pytest.raises(InvalidRequest, match="eviction"):
        PageManager(ManagerOptions(10_000, 16, eviction="random"), FakeStorage())
