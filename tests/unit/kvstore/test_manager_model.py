"""The page manager against a model that remembers everything and plans nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvstore.errors import (
    InvalidCommit,
    InvalidRequest,
    OutOfBlocks,
    PromptExceedsPool,
    QuotaExceeded,
    SequenceExists,
    SequenceNotFound,
)
from kvstore.eviction import DEFAULT_POLICY, POLICIES
from kvstore.types import (
    CommitPlan,
    ExtendPlan,
    ForkPlan,
    OpenPlan,
    TenantLimits,
    TruncatePlan,
    Update,
)
from tests.unit.kvstore.leaving_rules import LeavingRules
from tests.unit.kvstore.machine import Machine
from tests.unit.kvstore.manager_model import SPACES
from tests.unit.kvstore.twin_rules import TwinRules
from tests.unit.kvstore.update_rules import UpdateRules


class PageManagerMachine(TwinRules, UpdateRules, LeavingRules, Machine):
    @initialize(num_blocks=st.integers(1, 14), num_host_blocks=st.integers(0, 8), data=st.data())
    def start(self, num_blocks, num_host_blocks, data):
        limits = {}
        if data.draw(st.booleans(), "limited"):
            floor = data.draw(st.integers(0, num_blocks), "floor")
            quota = data.draw(st.none() | st.integers(max(1, floor), num_blocks), "quota")
            limits = {"x": TenantLimits(floor, quota)}
        self.begin(num_blocks, num_host_blocks, limits)

    def draw_plan(self, data) -> OpenPlan:
        """Few distinct blocks, so that prompts often share prefixes."""
        kinds = data.draw(st.lists(st.integers(0, 1), min_size=0, max_size=4), "blocks")
        tail = data.draw(st.integers(0 if kinds else 1, self.block_size - 1), "tail")
        tokens = [kind for kind in kinds for _ in range(self.block_size)] + [0] * tail
        self.next_id += 1
        space = data.draw(st.sampled_from(SPACES), "space")
        group = data.draw(st.sampled_from(["", "", "g", "h"]), "group")
        return OpenPlan(f"s{self.next_id}", tokens, space, group=group)

    def pick(self, data) -> str:
        return data.draw(st.sampled_from(self.resident), "sequence")

    # --- what happens -------------------------------------------------------

    @rule(data=st.data(), count=st.integers(1, 3))
    def open_group(self, data, count):
        plans = [self.draw_plan(data) for _ in range(count)]
        sizes = [self.blocks_for(len(plan.token_ids)) for plan in plans]
        room = self.room()
        best = sum(self.best_hit(plan.namespace, plan.token_ids) for plan in plans)
        before = self.snapshot()
        try:
            opened = self.manager.open_sequences(plans)
        except PromptExceedsPool:
            assert self.options.tenants or max(sizes) > self.num_blocks
            assert self.snapshot() == before
        except (OutOfBlocks, QuotaExceeded):
            assert self.options.tenants or sum(sizes) > room
            assert self.snapshot() == before
        else:
            assert max(sizes) <= self.num_blocks
            assert sum(sizes) - best <= room or len(self.manager.list_pins()) < len(before[2])
            hits = [o.num_cached_tokens // self.block_size for o in opened]
            shared = {b for o, n in zip(opened, hits, strict=True) for b in o.block_ids[:n]}
            fresh = [b for o, n in zip(opened, hits, strict=True) for b in o.block_ids[n:]]
            assert len(set(fresh)) == len(fresh)
            assert not shared & set(fresh)
            for plan, one in zip(plans, opened, strict=True):
                self.admit(plan, one)

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def open_again(self, data):
        sequence_id = self.pick(data)
        known = self.open[sequence_id]
        if known.opened is None:
            return
        before = self.snapshot()
        plan = OpenPlan(sequence_id, known.prompt, known.space)
        [again] = self.manager.open_sequences([plan])
        assert again in (known.opened, replace(known.opened, copies=[]))
        for tokens, space in [
            ([*known.prompt, 0], known.space),
            ([known.prompt[0] + 1, *known.prompt[1:]], known.space),
            (known.prompt, SPACES[known.space == SPACES[0]]),
        ]:
            with pytest.raises(SequenceExists):
                self.manager.open_sequences([OpenPlan(sequence_id, tokens, space)])
        assert self.snapshot() == before

    @precondition(lambda self: self.resident)
    @rule(data=st.data(), more=st.integers(-3, 40))
    def extend(self, data, more):
        sequence_id = self.pick(data)
        self.extend_to(sequence_id, self.open[sequence_id].length + more)

    @precondition(lambda self: self.resident)
    @rule(data=st.data(), new=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def decode(self, data, new):
        """Some steps of a driver: slots for new tokens, their KV, and the news of it."""
        self.write(self.pick(data), new)

    @precondition(lambda self: self.resident)
    @rule(data=st.data(), count=st.integers(1, 2))
    def fork(self, data, count):
        source_id = self.pick(data)
        num_known = len(self.open[source_id].tokens)
        lengths = st.sampled_from([0, num_known]) | st.integers(1, num_known)
        plans = [
            ForkPlan(source_id, f"f{self.next_id + n}", data.draw(lengths, "length"))
            for n in range(count)
        ]
        self.next_id += count
        for plan, forked in zip(plans, self.manager.fork_sequences(plans), strict=True):
            self.note_fork(plan, forked)
        before = self.snapshot()
        for wrong, error in [
            (ForkPlan(source_id, source_id), SequenceExists),
            (ForkPlan("ghost", "new"), SequenceNotFound),
            (ForkPlan(source_id, "new", num_known + 1), InvalidRequest),
            (ForkPlan(source_id, "new", -1), InvalidRequest),
            (ForkPlan("never", "new", num_known + 1), InvalidRequest),
        ]:
            with pytest.raises(error):
                self.manager.fork_sequences([ForkPlan(source_id, "never"), wrong])
        assert self.snapshot() == before

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def truncate(self, data):
        sequence_id = self.pick(data)
        known = self.open[sequence_id]
        length = data.draw(st.integers(1, known.length), "length")
        before = self.snapshot()
        for wrong in (0, length + 1, known.length + 1):
            with pytest.raises(InvalidRequest):
                self.manager.truncate_sequences(
                    [TruncatePlan(sequence_id, length), TruncatePlan(sequence_id, wrong)]
                )
        assert self.snapshot() == before
        self.manager.truncate_sequences([TruncatePlan(sequence_id, length)])
        self.note_cut(sequence_id, length)

    @precondition(lambda self: self.resident)
    @rule(data=st.data(), new=st.lists(st.integers(0, 1), max_size=9))
    def commit(self, data, new):
        sequence_id = self.pick(data)
        known = self.open[sequence_id]
        start = data.draw(st.integers(0, len(known.tokens)), "start")
        tokens = known.tokens + new
        count = data.draw(st.integers(0, min(known.length, len(tokens))), "computed")
        self.manager.commit_blocks([CommitPlan(sequence_id, count, start, tokens[start:])])
        known.tokens = tokens
        self.compute(sequence_id, count)

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def compute_all(self, data):
        self.compute_and_commit(self.pick(data))

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def commit_nonsense(self, data):
        sequence_id = self.pick(data)
        known = self.open[sequence_id]
        size = len(known.tokens)
        before = self.snapshot()
        for plan in [
            CommitPlan(sequence_id, 0, size + 1, [0]),
            CommitPlan(sequence_id, 0, 0, [known.tokens[0] + 1]),
            CommitPlan(sequence_id, size + 1),
            CommitPlan(sequence_id, known.length + 1, size, [0] * (known.length + 2)),
        ]:
            with pytest.raises(InvalidCommit):
                self.manager.commit_blocks([plan])
        assert self.snapshot() == before

    @precondition(lambda self: self.resident)
    @rule(data=st.data(), times=st.integers(1, 2))
    def close(self, data, times):
        sequence_id = self.pick(data)
        self.manager.close_sequences([sequence_id] * times)
        del self.open[sequence_id]

    @rule(data=st.data())
    def cancel_before_prefill(self, data):
        """Fault C5: what was never computed is never found."""
        plan = self.draw_plan(data)
        best = self.best_hit(plan.namespace, plan.token_ids)
        result = self.manager.update(Update(opens=[plan]))
        for opened in result.opened:
            self.admit(plan, opened)
            self.manager.close_sequences([plan.sequence_id])
            del self.open[plan.sequence_id]
            (again,) = self.manager.open_sequences([plan])
            assert again.num_cached_tokens == opened.num_cached_tokens
            assert again.num_cached_tokens <= best * self.block_size
            self.admit(plan, again)

    @rule()
    def touch_what_is_not_there(self):
        before = self.snapshot()
        self.manager.close_sequences(["ghost"])
        for call, plan in [
            (self.manager.extend_sequences, ExtendPlan("ghost", 1)),
            (self.manager.commit_blocks, CommitPlan("ghost", 0)),
        ]:
            with pytest.raises(SequenceNotFound):
                call([plan])
        assert self.snapshot() == before


class TwinMachine(TwinRules, Machine):
    """Hardly anything but twins, and room for them."""

    @initialize(num_blocks=st.integers(6, 20), num_host_blocks=st.integers(0, 12))
    def start(self, num_blocks, num_host_blocks):
        self.begin(num_blocks, num_host_blocks)

    @rule()
    def fill(self):
        self.fill_up(self.num_blocks)

    @precondition(lambda self: self.suspended)
    @rule(data=st.data(), runs_copies=st.booleans(), commits=st.booleans())
    def resume(self, data, runs_copies, commits):
        key = data.draw(st.sampled_from(self.suspended), "sequence")
        self.bring_back([key], runs_copies, commits=commits)

    @precondition(lambda self: self.resident)
    @rule(data=st.data())
    def close(self, data):
        self.leave(data, data.draw(st.sampled_from(self.resident), "sequence"), "close")

    @rule()
    def crash(self):
        self.restart(repair=False)


def case(
    size: int, eviction: str = DEFAULT_POLICY, num_examples: int = 60, base=PageManagerMachine
):
    parts = {"block_size": size, "eviction": eviction}
    machine = type(f"{base.__name__}{size}{eviction}", (base,), parts)
    machine.TestCase.settings = settings(
        max_examples=num_examples,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return machine.TestCase


TestBlockSize8, TestBlockSize16, TestBlockSize32 = case(8), case(16), case(32)
TestTwins = case(8, num_examples=100, base=TwinMachine)
TestGdsf, TestLhd = case(8, "gdsf", 30), case(8, "lhd", 30)
TestLru, TestS3Fifo = case(8, "lru", 30), case(8, "s3-fifo", 30)


def test_every_policy_has_a_machine():
    machines = [TestGdsf, TestLhd, TestLru, TestS3Fifo]
    assert len(machines) == len(POLICIES)
