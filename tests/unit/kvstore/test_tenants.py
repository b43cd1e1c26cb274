"""Floors and quotas: what a tenant is sure of, may have, and pays for others."""

from __future__ import annotations

import pytest

from kvstore.errors import InvalidRequest, OutOfBlocks, PromptExceedsPool, QuotaExceeded
from kvstore.types import CommitPlan, ExtendPlan, Namespace, TenantLimits, Update


def space(tenant: str) -> Namespace:
    return Namespace(b"m" * 32, tenant=tenant)


@pytest.fixture
def run(plan):
    """Open, compute and close a prompt: it is cached then."""

    def run(manager, name, length, first, tenant) -> None:
        manager.open_sequences([plan(name, length, first, space(tenant))])
        manager.commit_blocks([CommitPlan(name, length)])
        manager.close_sequences([name])

    return run


def usage(manager) -> dict[str, tuple[int, int]]:
    return {one.tenant: (one.num_held, one.num_cached) for one in manager.stats().tenants}


def test_a_floor_is_kept_free_for_its_tenant(managers, plan):
    manager = managers(10, tenants={"sure": TenantLimits(floor=4)})
    manager.open_sequences([plan("a", 6 * 8, 0, space("other"))])
    before = manager.stats()
    with pytest.raises(OutOfBlocks):
        manager.extend_sequences([ExtendPlan("a", 6 * 8 + 1)])
    assert manager.stats() == before
    manager.open_sequences([plan("b", 4 * 8, 1000, space("sure"))])
    with pytest.raises(OutOfBlocks):
        manager.extend_sequences([ExtendPlan("b", 4 * 8 + 1)])


def test_what_is_cached_below_a_floor_is_not_evicted_for_others(managers, plan, run):
    manager = managers(10, tenants={"sure": TenantLimits(floor=4)})
    run(manager, "a", 4 * 8, 0, "sure")
    for number in range(5):
        run(manager, f"b{number}", 6 * 8, 1000 * (number + 1), "other")
    assert usage(manager)["sure"] == (0, 4)
    [again] = manager.open_sequences([plan("again", 4 * 8 + 1, 0, space("sure"))])
    assert again.num_cached_tokens == 4 * 8


def test_what_is_above_a_floor_goes_when_others_need_room(managers, plan, run):
    manager = managers(10, tenants={"sure": TenantLimits(floor=4)})
    run(manager, "a", 9 * 8, 0, "sure")
    run(manager, "b", 6 * 8, 1000, "other")
    assert usage(manager) == {"sure": (0, 4), "other": (0, 6)}


def test_who_is_furthest_above_its_floor_makes_room(managers, run):
    limits = {"x": TenantLimits(floor=1), "y": TenantLimits(floor=3)}
    manager = managers(12, tenants=limits)
    run(manager, "x", 6 * 8, 0, "x")
    run(manager, "y", 6 * 8, 1000, "y")
    run(manager, "z", 2 * 8, 2000, "z")
    assert usage(manager) == {"x": (0, 4), "y": (0, 6), "z": (0, 2)}


def test_a_tenant_at_its_quota_gives_up_its_own(managers, run):
    manager = managers(10, tenants={"x": TenantLimits(quota=4)})
    run(manager, "other", 5 * 8, 0, "other")
    run(manager, "a", 4 * 8, 1000, "x")
    run(manager, "b", 3 * 8, 2000, "x")
    assert usage(manager) == {"x": (0, 4), "other": (0, 5)}
    assert manager.stats().evictions == {"quota": 3}


def test_a_quota_that_is_held_refuses_and_changes_nothing(managers, plan):
    manager = managers(10, tenants={"x": TenantLimits(quota=4)})
    manager.open_sequences([plan("a", 3 * 8, 0, space("x"))])
    before = manager.stats()
    with pytest.raises(QuotaExceeded) as caught:
        manager.open_sequences([plan("b", 2 * 8, 1000, space("x"))])
    assert caught.value.metadata == {
        "tenant": "x",
        "needed_block_count": "2",
        "held_block_count": "3",
        "quota_block_count": "4",
    }
    assert manager.stats() == before


def test_one_tenants_full_quota_does_not_hold_up_another(managers, plan):
    manager = managers(10, tenants={"x": TenantLimits(quota=2)})
    manager.open_sequences([plan("a", 2 * 8, 0, space("x"))])
    result = manager.update(
        Update(
            opens=[
                plan("b", 8, 1000, space("x")),
                plan("c", 8, 2000, space("other")),
                plan("d", 8, 0, space("x")),
            ]
        )
    )
    assert [opened.sequence_id for opened in result.opened] == ["c"]
    assert [(r.sequence_id, r.reason) for r in result.refused] == [
        ("b", "QUOTA_EXCEEDED"),
        ("d", "QUOTA_EXCEEDED"),
    ]


@pytest.mark.parametrize(("tenant", "most"), [("x", 4), ("sure", 10), ("other", 7)])
def test_a_prompt_that_its_tenant_can_never_have_is_refused_as_such(managers, plan, tenant, most):
    limits = {"sure": TenantLimits(floor=3), "x": TenantLimits(quota=4)}
    manager = managers(10, tenants=limits)
    manager.open_sequences([plan("fits", most * 8, 0, space(tenant))])
    manager.close_sequences(["fits"])
    with pytest.raises(PromptExceedsPool, match=f"{most} can be had"):
        manager.open_sequences([plan("a", most * 8 + 1, 0, space(tenant))])


@pytest.mark.parametrize(
    "limits",
    [
        {"x": TenantLimits(floor=11)},
        {"x": TenantLimits(floor=6), "y": TenantLimits(floor=5)},
        {"x": TenantLimits(floor=3, quota=2)},
        {"x": TenantLimits(quota=0)},
    ],
)
def test_limits_beyond_the_pool_are_refused_when_it_is_made(managers, limits):
    with pytest.raises(InvalidRequest, match="tenants"):
        managers(10, tenants=limits)


def test_wrong_limits_leave_a_pool_to_be_taken_over_with_right_ones(managers, storage, run, plan):
    run(managers(10, storage=storage), "a", 4 * 8, 0, "x")
    with pytest.raises(InvalidRequest):
        managers(10, storage=storage, tenants={"x": TenantLimits(floor=11)})
    manager = managers(10, storage=storage, tenants={"x": TenantLimits(floor=5)})
    [again] = manager.open_sequences([plan("again", 4 * 8 + 1, 0, space("x"))])
    assert again.num_cached_tokens == 4 * 8


def test_new_limits_that_are_passed_already_come_true_bit_by_bit(managers, storage, plan):
    """Others hold more than a new floor leaves them; the tenant gets what there is."""
    manager = managers(10, storage=storage)
    manager.open_sequences([plan("a", 5 * 8, 0, space("other"))])
    manager.open_sequences([plan("b", 3 * 8, 1000, space("other"))])
    limits = {"sure": TenantLimits(floor=6), "other": TenantLimits(quota=7)}
    manager = managers(10, storage=storage, tenants=limits)
    assert manager.audit() == []
    with pytest.raises((OutOfBlocks, QuotaExceeded)):
        manager.extend_sequences([ExtendPlan("a", 5 * 8 + 1)])
    manager.open_sequences([plan("c", 2 * 8, 2000, space("sure"))])
    with pytest.raises(OutOfBlocks):
        manager.extend_sequences([ExtendPlan("c", 2 * 8 + 1)])
    manager.close_sequences(["b"])
    manager.extend_sequences([ExtendPlan("c", 5 * 8)])
    assert manager.audit() == []
