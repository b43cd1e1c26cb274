from __future__ import annotations

import asyncio
import math

import pytest

from gateway.errors import (
    InvalidField,
    PinRefused,
    SessionBusy,
    SessionNotFound,
    WorkerUnavailable,
)
from gateway.ports import Namespace
from gateway.sessions import SessionOptions, Sessions

NAMESPACE = Namespace(b"f", tenant="t", salt="s")


class FakePins:
    """Pins by id; `error` is raised instead, and `gate` holds calls up."""

    def __init__(self):
        self.plans = {}
        self.calls = []
        self.error = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def pin_prefix(self, plan):
        self.calls.append(("pin", plan.owner))
        await self.gate.wait()
        if self.error:
            raise self.error
        self.plans[plan.pin_id] = plan

    async def unpin(self, pin_id):
        await self.gate.wait()
        if self.error:
            raise self.error
        self.calls.append(("unpin", self.plans.pop(pin_id).owner))


class Bench:
    def __init__(self, **limits):
        self.now = 0.0
        self.pins = FakePins()
        self.sessions = Sessions(self.pins, clock=lambda: self.now, **limits)

    def turn(self, session_id, token_ids=(), *, answer=(), tenant="", **options):
        """A whole turn; the tokens before its prompt."""
        turn = self.sessions.begin(tenant, SessionOptions(session_id, **options))
        self.sessions.keep(turn, [*turn.prefix, *token_ids, *answer], NAMESPACE)
        self.sessions.end(turn)
        return list(turn.prefix)


@pytest.fixture
async def new_bench():
    return Bench


@pytest.fixture
async def bench():
    return Bench()


async def test_the_next_turn_begins_with_the_tokens_of_the_last(bench):
    assert bench.turn("a", [1, 2], answer=[3]) == []
    assert bench.turn("a", [4], answer=[5], source_id="a") == [1, 2, 3]
    assert bench.turn("a", source_id="a") == [1, 2, 3, 4, 5]


async def test_branches_fork_at_any_token_and_leave_the_source_alone(bench):
    bench.turn("a", [1, 2, 3])
    assert bench.turn("b", [9], source_id="a", num_source_tokens=2) == [1, 2]
    assert bench.turn("c", source_id="a") == [1, 2, 3]
    assert bench.turn("d", source_id="b") == [1, 2, 9]


async def test_without_a_source_the_session_is_replaced(bench):
    bench.turn("a", [1, 2, 3])
    assert bench.turn("a", [7]) == []
    assert bench.turn("b", source_id="a") == [7]


async def test_a_pin_keeps_the_tokens_of_the_latest_turn_only(bench):
    bench.turn("a", [1, 2])
    bench.turn("a", [3], source_id="a", ttl=60)
    await bench.sessions.settle()
    [plan] = bench.pins.plans.values()
    assert (plan.token_ids, plan.namespace, plan.ttl_seconds) == ([1, 2, 3], NAMESPACE, 60)
    assert bench.pins.calls[-2:] == [("pin", "session a"), ("unpin", "session a")]


async def test_calls_to_the_kvstore_keep_their_order(bench):
    bench.pins.gate.clear()
    for token in range(5):
        bench.turn("a", [token], source_id="a" if token else "")
    await asyncio.sleep(0)
    bench.pins.gate.set()
    await bench.sessions.settle()
    [plan] = bench.pins.plans.values()
    assert plan.token_ids == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("error", [PinRefused("no room"), WorkerUnavailable("gone")])
async def test_a_session_whose_pin_is_refused_goes_on(bench, error):
    bench.pins.error = error
    bench.turn("a", [1, 2])
    assert bench.turn("a", [3], source_id="a") == [1, 2]
    await bench.sessions.settle()
    assert bench.sessions.num_refused_pins == 2
    assert bench.turn("a", source_id="a") == [1, 2, 3]


async def test_what_can_never_be_found_is_not_pinned(bench):
    turn = bench.sessions.begin("", SessionOptions("a"))
    bench.sessions.keep(turn, [1], None)
    await bench.sessions.settle()
    assert not bench.pins.calls


async def test_a_session_lapses_after_its_time_unless_it_is_used(bench):
    bench.turn("a", [1], ttl=10)
    bench.turn("b", [2], ttl=10)
    bench.now = 9
    bench.turn("c", source_id="a")
    bench.now = 18
    assert bench.turn("d", source_id="a") == [1]
    with pytest.raises(SessionNotFound):
        bench.turn("d", source_id="b")
    await bench.sessions.settle()
    assert bench.pins.calls.count(("pin", "session a")) == 3  # renewed with each use


async def test_sessions_are_a_tenants_own(bench):
    bench.turn("a", [1], tenant="x")
    with pytest.raises(SessionNotFound):
        bench.turn("a", source_id="a", tenant="y")
    bench.turn("a", [2], tenant="y")
    assert bench.turn("b", source_id="a", tenant="x") == [1]


async def test_a_session_has_one_turn_at_a_time(bench):
    bench.turn("a", [1])
    turn = bench.sessions.begin("", SessionOptions("a", source_id="a"))
    with pytest.raises(SessionBusy):
        bench.sessions.begin("", SessionOptions("a"))
    assert bench.turn("b", source_id="a") == [1]  # a branch is another session
    assert bench.turn("a", tenant="x") == []
    bench.sessions.end(turn)
    assert bench.turn("a", source_id="a") == [1]


async def test_a_turn_that_fails_changes_nothing(bench):
    bench.turn("a", [1])
    bench.sessions.end(bench.sessions.begin("", SessionOptions("a")))
    assert bench.turn("b", source_id="a") == [1]
    with pytest.raises(SessionNotFound):
        bench.turn("new", source_id="nobody")
    assert bench.turn("new") == []


async def test_the_least_recently_used_lapse_first_beyond_the_limits(new_bench):
    bench = new_bench(max_sessions=2, max_tokens=10)
    bench.turn("a", [1])
    bench.turn("b", [2])
    bench.turn("c", source_id="a")
    with pytest.raises(SessionNotFound):
        bench.turn("x", source_id="b")
    bench.turn("d", [0] * 10)
    assert (len(bench.sessions), bench.sessions.num_tokens) == (1, 10)
    bench.turn("e", [0] * 11)
    assert (len(bench.sessions), bench.sessions.num_tokens) == (0, 0)
    await bench.sessions.settle()
    assert not bench.pins.plans


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"id": ""}, "session.id"),
        ({"id": "a b"}, "session.id"),
        ({"id": "a" * 65}, "session.id"),
        ({"id": "a", "ttl": 0.5}, "session.ttl"),
        ({"id": "a", "ttl": 86_401.0}, "session.ttl"),
        ({"id": "a", "ttl": math.nan}, "session.ttl"),
        ({"id": "a", "source_id": "a b"}, "session.source_id"),
        ({"id": "a", "num_source_tokens": 1}, "session.source_token_count"),
        ({"id": "a", "source_id": "s", "num_source_tokens": -1}, "session.source_token_count"),
        ({"id": "a", "source_id": "s", "num_source_tokens": 4}, "session.source_token_count"),
    ],
    ids=str,
)
async def test_a_wrong_option_is_named(bench, options, field):
    bench.turn("s", [1, 2, 3])
    with pytest.raises(InvalidField) as caught:
        bench.sessions.begin("", SessionOptions(**options))
    assert caught.value.field == field
    assert bench.turn("a", source_id="s", num_source_tokens=3) == [1, 2, 3]
