"""A kvstore looks after itself while nobody calls."""

from __future__ import annotations

import pytest
import structlog

from kvstore.attachment import ManagerOptions
from kvstore.fakes import FakeStorage
from kvstore.manager import PageManager
from kvstore.types import KvShape, Namespace, OpenPlan, PinPlan, Update
from services.kvstore import upkeep
from services.kvstore.upkeep import Upkeep

SHAPE = KvShape(num_layers=1, num_kv_heads=1, head_size=8, dtype="bfloat16")
SPACE = Namespace(b"m")


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(upkeep, "time", clock)
    return clock


@pytest.fixture
def manager(clock):
    options = ManagerOptions(8 * 8 * SHAPE.token_bytes, 8)
    manager = PageManager(options, FakeStorage(), clock=clock.monotonic)
    manager.attach_pool(SHAPE)
    return manager


def open_one(manager, name: str) -> None:
    manager.open_sequences([OpenPlan(name, range(9), SPACE)])


def num_audits(manager) -> int:
    return manager.stats().num_audits


def test_an_idle_pool_is_audited_once_after_a_change(manager, clock):
    care = Upkeep(manager, audit_after=30)
    open_one(manager, "a")
    care.look()
    clock.now += 29
    care.look()
    assert num_audits(manager) == 0
    for _ in range(3):
        clock.now += 30
        care.look()
    assert num_audits(manager) == 1
    open_one(manager, "b")
    care.look()
    clock.now += 31
    care.look()
    assert num_audits(manager) == 2


def test_calls_that_change_nothing_do_not_keep_a_pool_from_its_audit(manager, clock):
    """A gateway asks every second whether the kvstore is still there."""
    care = Upkeep(manager, audit_after=30)
    open_one(manager, "a")
    care.look()
    for _ in range(31):
        clock.now += 1
        manager.update(Update(closes=["probe"]))
        care.look()
    assert num_audits(manager) == 1


def test_a_busy_pool_is_not_audited(manager, clock):
    care = Upkeep(manager, audit_after=30)
    for _ in range(40):
        clock.now += 5
        open_one(manager, "a")
        manager.close_sequences(["a"])
        care.look()
    assert num_audits(manager) == 0


def test_no_audits_if_none_are_wanted(manager, clock):
    care = Upkeep(manager, audit_after=0)
    open_one(manager, "a")
    for _ in range(3):
        clock.now += 1000
        care.look()
    assert num_audits(manager) == 0


def test_findings_stand_in_the_log(manager, clock):
    care = Upkeep(manager, audit_after=30)
    open_one(manager, "a")
    care.look()
    manager._attached.state.num_waste_slots += 1
    clock.now += 31
    with structlog.testing.capture_logs() as logs:
        care.look()
    [entry] = logs
    assert (entry["log_level"], entry["kind"]) == ("error", "sequences")
    assert "waste" in entry["finding"]


def test_pins_end_in_time_without_any_call(manager, clock):
    care = Upkeep(manager, audit_after=0)
    manager.pin_prefix(PinPlan("p", "o", 10, SPACE, range(8)))
    clock.now += 11
    care.look()
    assert manager.stats().num_pins == 0


def test_a_journal_without_room_is_told_of_and_written_again_when_there_is_some(
    manager, clock, monkeypatch
):
    care = Upkeep(manager, audit_after=0)
    file = manager._attached.memory.journal
    with monkeypatch.context() as patch:
        patch.setattr(file, "append", lambda record: False)
        patch.setattr(file, "replace", lambda records: 0)
        open_one(manager, "a")
        with structlog.testing.capture_logs() as logs:
            care.look()
        assert [entry["log_level"] for entry in logs] == ["error"]
        assert not manager.stats().is_journal_whole
        assert [finding.kind for finding in manager.audit()] == ["journal"]
    with structlog.testing.capture_logs() as logs:
        care.look()
    assert [entry["log_level"] for entry in logs] == ["info"]
    assert manager.stats().is_journal_whole
    assert manager.audit() == []
