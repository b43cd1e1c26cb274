"""Pins: what they keep, for how long, and who gives way to whom."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvstore.errors import (
    InvalidRequest,
    OutOfBlocks,
    PinBudgetExceeded,
    PinExists,
    PinNotFound,
    SequenceNotFound,
)
from kvstore.types import CommitPlan, ExtendPlan, Namespace, PinPlan, TenantLimits, Update

SPACE = Namespace(b"m" * 32)
OTHER = Namespace(b"m" * 32, tenant="other")


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def make(managers, clock):
    def make(num_blocks=20, **options):
        return managers(num_blocks, clock=clock, **options)

    return make


@pytest.fixture
def compute(plan):
    """Open, compute and close a prompt."""

    def compute(manager, length, first=0, space=SPACE) -> int:
        [opened] = manager.open_sequences([plan("computed", length, first, space)])
        manager.commit_blocks([CommitPlan("computed", length)])
        manager.close_sequences(["computed"])
        return opened.num_cached_tokens

    return compute


def pin(pin_id, length, first=0, *, ttl=60.0, priority=0, owner="o", space=SPACE) -> PinPlan:
    tokens = range(first, first + length)
    return PinPlan(pin_id, owner, ttl, space, tokens, priority=priority)


def test_a_pinned_prefix_outlasts_any_pressure(make, compute):
    manager = make()
    compute(manager, 33)
    info = manager.pin_prefix(pin("p", 35))
    assert (info.num_tokens, info.num_cached_tokens, info.tenant) == (32, 32, "")
    for number in range(1, 20):
        compute(manager, 16 * 8, 10_000 * number)
    assert compute(manager, 33) == 32
    stats = manager.stats()
    assert (stats.num_pins, stats.num_pinned, stats.num_held) == (1, 4, 4)


def test_a_pin_takes_what_is_computed_after_it(make, compute):
    """A system prompt can be pinned before anybody has used it."""
    manager = make()
    assert manager.pin_prefix(pin("p", 40)).num_cached_tokens == 0
    compute(manager, 17)
    assert [one.num_cached_tokens for one in manager.list_pins()] == [16]
    compute(manager, 60)
    assert [one.num_cached_tokens for one in manager.list_pins()] == [40]
    assert manager.stats().num_pinned == 5


def test_a_sequence_can_be_pinned_with_what_it_generated(make, plan):
    manager = make()
    manager.open_sequences([plan("a", 10)])
    manager.extend_sequences([ExtendPlan("a", 18)])
    manager.commit_blocks([CommitPlan("a", 18, 10, range(500, 508))])
    info = manager.pin_prefix(PinPlan("p", "o", 60, sequence_id="a"))
    assert (info.num_tokens, info.num_cached_tokens) == (16, 16)
    manager.close_sequences(["a"])
    assert manager.stats().num_pinned == 2


def test_a_pin_ends_with_its_time_unless_it_is_renewed(make, compute, clock):
    manager = make()
    compute(manager, 33)
    manager.pin_prefix(pin("short", 32, ttl=10))
    manager.pin_prefix(pin("renewed", 16, ttl=10))
    clock.now += 8
    assert manager.renew_pin("renewed", 10).ttl_seconds == 10
    clock.now += 4
    manager.keep()
    assert [one.pin_id for one in manager.list_pins()] == ["renewed"]
    assert manager.stats().num_pinned == 2
    with pytest.raises(PinNotFound):
        manager.renew_pin("short", 10)


def test_a_repeat_renews_and_another_prefix_or_owner_is_refused(make, compute, clock):
    manager = make()
    compute(manager, 33)
    manager.pin_prefix(pin("p", 32, ttl=10))
    clock.now += 5
    assert manager.pin_prefix(pin("p", 32, ttl=10)).ttl_seconds == 10
    before = manager.stats(), manager.list_pins()
    for other in (pin("p", 16), pin("p", 32, owner="else"), pin("p", 32, space=OTHER)):
        with pytest.raises(PinExists):
            manager.pin_prefix(other)
    assert (manager.stats(), manager.list_pins()) == before


def test_pins_end_by_id_or_all_of_an_owner(make):
    manager = make()
    for name, owner in (("a", "x"), ("b", "x"), ("c", "y")):
        manager.pin_prefix(pin(name, 8, 100 * ord(name), owner=owner))
    assert manager.unpin(pin_id="c") == 1
    assert manager.unpin(pin_id="c") == 0
    assert manager.unpin(owner="x") == 2
    assert manager.list_pins() == []


def test_a_drivers_pins_end_with_its_lease_or_are_adopted(make, compute):
    manager = make()
    compute(manager, 33)
    first, _ = manager.acquire_driver_lease()
    manager.pin_prefix(pin("driver", 16), first)
    manager.pin_prefix(pin("client", 32))
    second, _ = manager.acquire_driver_lease(adopt=True)
    assert [one.pin_id for one in manager.list_pins()] == ["driver", "client"]
    manager.release_driver_lease(second)
    assert [one.pin_id for one in manager.list_pins()] == ["client"]


def test_a_block_that_two_pins_hold_is_held_until_both_have_ended(make, compute):
    manager = make()
    compute(manager, 33)
    manager.pin_prefix(pin("long", 32))
    manager.pin_prefix(pin("short", 16))
    assert manager.stats().num_pinned == 4
    manager.unpin(pin_id="long")
    assert manager.stats().num_pinned == 2
    manager.unpin(pin_id="short")
    stats = manager.stats()
    assert (stats.num_pinned, stats.num_held, stats.num_cached) == (0, 0, 4)


def test_pins_stay_within_the_budgets(make):
    manager = make(pin_share=0.5, tenant_pin_share=0.25)
    manager.pin_prefix(pin("a", 5 * 8))
    before = manager.stats(), manager.list_pins()
    with pytest.raises(PinBudgetExceeded):
        manager.pin_prefix(pin("b", 8, 1000))
    manager.pin_prefix(pin("c", 5 * 8, 2000, space=OTHER))
    with pytest.raises(PinBudgetExceeded):
        manager.pin_prefix(pin("d", 8, 3000, space=Namespace(b"m" * 32, tenant="third")))
    assert manager.list_pins()[:1] == before[1]


def test_weaker_pins_give_way_and_only_as_many_as_must(make):
    manager = make(pin_share=0.5)
    manager.pin_prefix(pin("weak", 4 * 8, 0, priority=1))
    manager.pin_prefix(pin("weakest", 3 * 8, 1000, priority=0))
    manager.pin_prefix(pin("strong", 3 * 8, 2000, priority=5))
    manager.pin_prefix(pin("new", 2 * 8, 3000, priority=2))
    assert [one.pin_id for one in manager.list_pins()] == ["weak", "strong", "new"]
    with pytest.raises(PinBudgetExceeded):
        manager.pin_prefix(pin("equal", 6 * 8, 4000, priority=2))
    assert [one.pin_id for one in manager.list_pins()] == ["weak", "strong", "new"]


def test_a_prompt_that_only_pins_keep_out_makes_the_weakest_give_way(make, compute, plan):
    """No request waits for ever for what nobody uses."""
    manager = make(pin_share=1.0, tenant_pin_share=1.0)
    compute(manager, 8 * 8)
    compute(manager, 8 * 8, 1000)
    manager.pin_prefix(pin("weak", 8 * 8, priority=0))
    manager.pin_prefix(pin("strong", 8 * 8, 1000, priority=1))
    result = manager.update(Update(opens=[plan("big", 12 * 8, 5000)]))
    assert [opened.sequence_id for opened in result.opened] == ["big"]
    assert [one.pin_id for one in manager.list_pins()] == ["strong"]


def test_while_sequences_run_pins_do_not_give_way(make, compute, plan):
    manager = make(pin_share=1.0, tenant_pin_share=1.0)
    compute(manager, 12 * 8)
    manager.pin_prefix(pin("p", 12 * 8))
    manager.open_sequences([plan("running", 4 * 8, 1000)])
    with pytest.raises(OutOfBlocks):
        manager.open_sequences([plan("big", 6 * 8, 5000)])
    assert len(manager.list_pins()) == 1


def test_a_pin_leaves_others_their_floor(make, compute):
    manager = make(pin_share=1.0, tenant_pin_share=1.0, tenants={"other": TenantLimits(floor=15)})
    compute(manager, 5 * 8)
    manager.pin_prefix(pin("p", 5 * 8))
    assert compute(manager, 15 * 8, 1000, OTHER) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"pin_id": ""},
        {"pin_id": "x" * 129},
        {"owner": ""},
        {"ttl_seconds": 0.5},
        {"ttl_seconds": 8 * 86_400.0},
        {"ttl_seconds": float("nan")},
        {"token_ids": range(7)},
        {"token_ids": ()},
        {"token_ids": [-1] * 8},
        {"namespace": None},
        {"priority": 1001},
    ],
)
def test_what_makes_no_sense_is_refused(make, compute, change):
    manager = make()
    compute(manager, 33)
    before = manager.stats()
    fields = {"pin_id": "p", "owner": "o", "ttl_seconds": 60.0, "namespace": SPACE}
    with pytest.raises(InvalidRequest):
        manager.pin_prefix(PinPlan(**({"token_ids": range(32)} | fields | change)))
    assert manager.stats() == before


def test_a_sequence_that_is_not_open_cannot_be_pinned(make):
    with pytest.raises(SequenceNotFound):
        make().pin_prefix(PinPlan("p", "o", 60, sequence_id="ghost"))
