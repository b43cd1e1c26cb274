"""What leaves the page pool in the model-based test, and stays or comes back: rules."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvstore.errors import (
    InvalidRequest,
    OutOfBlocks,
    PinBudgetExceeded,
    PinNotFound,
    PromptExceedsPool,
    QuotaExceeded,
    SequenceNotSuspended,
    SequenceSuspended,
)
from kvstore.types import (
    CommitPlan,
    ExtendPlan,
    ForkPlan,
    OpenPlan,
    PinPlan,
    SuspendMode,
    SuspendPlan,
    TruncatePlan,
    Update,
)
from tests.unit.kvstore.manager_model import SPACES


class _Picked:
    """Draws one thing, for rules that are called by others."""

    def __init__(self, value) -> None:
        self.value = value

    def draw(self, strategy, label):
        return self.value


class LeavingRules:
    """Suspension, pins, pressure and crashes, for a machine over ManagerModel."""

    @precondition(lambda self: self.resident)
    @rule(data=st.data(), mode=st.sampled_from(SuspendMode), runs_copies=st.booleans())
    def suspend(self, data, mode, runs_copies):
        ids = data.draw(st.sets(st.sampled_from(self.resident), min_size=1, max_size=3), "ids")
        plans = [SuspendPlan(sequence_id, mode) for sequence_id in sorted(ids)]
        leaving, room = self.with_groups(sorted(ids)), self.room()
        answers, copies, transfer = self.manager.suspend_sequences(plans, runs_copies=runs_copies)
        assert [answer.sequence_id for answer in answers] == leaving
        assert sum(answer.num_freed_blocks for answer in answers) == self.room() - room
        assert len(copies) == sum(answer.num_copied_blocks for answer in answers)
        if not runs_copies or mode is SuspendMode.RECOMPUTE:
            assert {answer.mode for answer in answers} == {SuspendMode.RECOMPUTE}
            assert not copies
        self.run(copies)
        self.transfer = max(self.transfer, transfer)
        for sequence_id in leaving:
            self.note_leave(sequence_id)
        for call, plan in [
            (self.manager.extend_sequences, ExtendPlan(min(ids), 1000)),
            (self.manager.commit_blocks, CommitPlan(min(ids), 1)),
            (self.manager.truncate_sequences, TruncatePlan(min(ids), 1)),
            (self.manager.fork_sequences, ForkPlan(min(ids), "new")),
            (self.manager.suspend_sequences, SuspendPlan(min(ids))),
        ]:
            with pytest.raises(SequenceSuspended):
                call([plan])

    @precondition(lambda self: self.suspended)
    @rule(data=st.data(), runs_copies=st.booleans())
    def resume(self, data, runs_copies):
        ids = sorted(data.draw(st.sets(st.sampled_from(self.suspended), min_size=1), "ids"))
        self.bring_back(ids, runs_copies, commits=data.draw(st.booleans(), "commits"))

    @precondition(lambda self: self.resident)
    @rule(data=st.data(), new=st.lists(st.integers(0, 1), max_size=20))
    def swap_and_back(self, data, new):
        """The whole way of a swap, with a change of the pool in between."""
        sequence_id = self.pick(data)
        self.decode(data=_Picked(sequence_id), new=[*new, self.next_id % 7])
        plan = SuspendPlan(sequence_id, SuspendMode.SWAP)
        _, copies, transfer = self.manager.suspend_sequences([plan], runs_copies=True)
        self.run(copies)
        for one in self.group_of(sequence_id):
            self.note_leave(one)
        if transfer:
            self.manager.complete_transfer(transfer, 0.001)
        self.fill(count=self.num_blocks)
        self.bring_back([sequence_id], True, commits=True)

    @rule(count=st.integers(1, 14))
    def fill(self, count):
        """Something large comes and goes that was never seen before."""
        self.next_id += 1
        tokens = [1000 + self.next_id] * (min(count, self.num_blocks) * self.block_size)
        plan = OpenPlan(f"s{self.next_id}", tokens, SPACES[0])
        result = self.manager.update(Update(opens=[plan], runs_copies=True))
        self.run(result.copies)
        for opened in result.opened:
            self.admit(plan, opened)
            self.compute_and_commit(plan.sequence_id)
            self.manager.close_sequences([plan.sequence_id])
            del self.open[plan.sequence_id]
        if result.transfer:
            self.manager.complete_transfer(result.transfer, 0.0)

    def bring_back(self, ids, runs_copies, *, commits):
        before, room = self.snapshot(), self.room()
        returning = self.with_groups(ids)
        try:
            answers, copies, transfer = self.manager.resume_sequences(ids, runs_copies=runs_copies)
        except (OutOfBlocks, QuotaExceeded, PromptExceedsPool):
            sizes = sum(self.blocks_for(len(self.open[i].tokens)) for i in returning)
            assert self.options.tenants or sizes > room
            assert self.snapshot() == before
            return
        self.run(copies)
        self.transfer = max(self.transfer, transfer)
        assert [answer.sequence_id for answer in answers] == returning
        self.check_sharing(answers)
        for answer in answers:
            assert runs_copies or not answer.copies
            self.note_return(answer)
        for sequence_id in returning if commits else ():
            known = self.open[sequence_id]
            known.num_reported = known.num_computed
            self.manager.commit_blocks([CommitPlan(sequence_id, known.num_computed)])
        with pytest.raises(SequenceNotSuspended):
            self.manager.resume_sequences(ids)

    def check_sharing(self, answers):
        """Those who come back together have a block for what they have in common."""
        places = {}
        for answer in answers:
            known = self.open[answer.sequence_id]
            limit = max(known.num_reported, len(known.tokens) - 1)
            for index in range(limit // self.block_size):
                key = self.prefix(known.space, known.tokens, index + 1)
                places.setdefault(key, set()).add(answer.block_ids[index])
        assert all(len(blocks) == 1 for blocks in places.values())

    @precondition(lambda self: self.transfer)
    @rule()
    def complete(self):
        self.manager.complete_transfer(self.transfer, 0.001)

    @rule()
    def lose_the_driver(self):
        """Copies that it was to run never are, as far as anybody knows."""
        self.manager.acquire_driver_lease()

    @rule(data=st.data(), ttl=st.sampled_from([1.0, 5.0]))
    def pin(self, data, ttl):
        plan = self.draw_plan(data)
        tokens = list(plan.token_ids)
        full = len(tokens) // self.block_size * self.block_size
        pin_id = f"p{len(self.pins)}"
        before = self.snapshot()
        request = PinPlan(pin_id, "owner", ttl, plan.namespace, tokens)
        try:
            info = self.manager.pin_prefix(request)
        except InvalidRequest:
            assert not full
            assert self.snapshot() == before
        except (PinBudgetExceeded, OutOfBlocks, QuotaExceeded):
            assert self.snapshot() == before
        else:
            assert info.num_tokens == full
            assert info.num_cached_tokens <= full
            self.pins[pin_id] = (plan.namespace, tokens[:full], self.now + ttl)

    @precondition(lambda self: self.pins)
    @rule(data=st.data(), ttl=st.sampled_from([1.0, 5.0]), ends=st.booleans())
    def end_or_renew_a_pin(self, data, ttl, ends):
        pin_id = data.draw(st.sampled_from(sorted(self.pins)), "pin")
        space, tokens, until = self.pins[pin_id]
        is_there = any(pin.pin_id == pin_id for pin in self.manager.list_pins())
        assert is_there <= (until > self.now)
        if ends:
            assert self.manager.unpin(pin_id=pin_id) == is_there
            self.pins[pin_id] = (space, tokens, self.now)
        elif is_there:
            assert self.manager.renew_pin(pin_id, ttl).ttl_seconds == ttl
            self.pins[pin_id] = (space, tokens, self.now + ttl)
        else:
            with pytest.raises(PinNotFound):
                self.manager.renew_pin(pin_id, ttl)

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def wait(self, seconds):
        self.now += seconds
        self.manager.keep()

    @rule(repair=st.booleans())
    def crash(self, repair):
        self.restart(repair)

    def restart(self, repair):
        """The next manager finds everything that this one would have known."""
        if repair:
            self.manager.audit(repair=True)
        listed = self.manager.list_sequences(1000, with_tokens=True)
        pins = self.manager.list_pins()
        stats = self.manager.stats()
        self.num_crashes += 1
        self.start_manager()
        assert self.manager.audit() == []
        assert self.manager.list_sequences(1000, with_tokens=True) == listed
        assert self.manager.list_pins() == pins
        after = self.manager.stats()
        assert (after.num_held, after.num_cached) == (stats.num_held, stats.num_cached)
        assert after.num_waste_slots == stats.num_waste_slots
        self.transfer = 0
        for known in self.open.values():
            known.tail_may_be_found = True
