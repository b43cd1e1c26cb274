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
    QuotaExceeded,
    SequenceSuspended,
)
from kvstore.types import (
    CommitPlan,
    ExtendPlan,
    ForkPlan,
    PinPlan,
    SuspendMode,
    SuspendPlan,
    TruncatePlan,
)


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
        self.write(sequence_id, [*new, self.next_id % 7])
        self.swap_out(sequence_id, SuspendMode.SWAP, completes=True)
        self.fill_up(self.num_blocks)
        self.bring_back([sequence_id], True, commits=True)

    @rule(count=st.integers(1, 14))
    def fill(self, count):
        self.fill_up(count)

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
