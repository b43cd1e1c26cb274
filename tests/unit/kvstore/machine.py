"""What all machines over the page manager do, and what always holds for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant

from kvstore.errors import OutOfBlocks, PromptExceedsPool, QuotaExceeded, SequenceNotSuspended
from kvstore.types import CommitPlan, OpenPlan, SuspendPlan, Update
from tests.unit.kvstore.manager_model import SPACES, ManagerModel


class Machine(ManagerModel, RuleBasedStateMachine):
    """Steps for rules, and the invariants. Whoever inherits from it calls `begin` first."""

    def teardown(self):
        if hasattr(self, "manager"):
            self.manager.close_sequences(list(self.open))
            for pin_id in self.pins:
                self.manager.unpin(pin_id=pin_id)
            self.manager.acquire_driver_lease()  # what was on its way arrives no more
            assert self.manager.audit() == []
            stats = self.manager.stats()
            assert stats.num_free + stats.num_cached == stats.num_blocks
            assert stats.num_host_free + stats.num_host_cached == stats.num_host_blocks

    # --- steps --------------------------------------------------------------

    def write(self, key, new) -> bool:
        """Slots for new tokens, their KV, and the news of it; whether there was room."""
        tokens = self.open[key].tokens + list(new)
        if not self.extend_to(key, len(tokens)):
            return False
        known = self.open[key]
        start, known.tokens = len(known.tokens), tokens
        self.manager.commit_blocks([CommitPlan(key, len(tokens), start, tokens[start:])])
        self.compute(key, len(tokens))
        return True

    def compute_and_commit(self, sequence_id):
        known = self.open[sequence_id]
        count = min(known.length, len(known.tokens))
        self.manager.commit_blocks([CommitPlan(sequence_id, count)])
        self.compute(sequence_id, count)

    def fill_up(self, count):
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

    def swap_out(self, key, mode, *, completes) -> None:
        plan = SuspendPlan(key, mode)
        _, copies, transfer = self.manager.suspend_sequences([plan], runs_copies=True)
        self.run(copies)
        for one in self.group_of(key):
            self.note_leave(one)
        if transfer and completes:
            self.manager.complete_transfer(transfer, 0.001)
        elif transfer:
            self.transfer = max(self.transfer, transfer)

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
        for pin, before in zip(self.manager.list_pins(), pins, strict=True):
            # What sequences have and the tree had lost is found again.
            assert pin.num_cached_tokens >= before.num_cached_tokens
            assert replace(pin, num_cached_tokens=before.num_cached_tokens) == before
        after = self.manager.stats()
        assert (after.num_held, after.num_cached) == (stats.num_held, stats.num_cached)
        assert after.num_waste_slots == stats.num_waste_slots
        self.transfer = 0
        for known in self.open.values():
            known.tail_may_be_found = True

    # --- what always holds --------------------------------------------------

    @invariant()
    def nothing_is_wrong(self):
        if hasattr(self, "manager"):
            assert self.manager.audit() == []

    @invariant()
    def every_sequence_reads_its_own_kv(self):
        """Whatever others have written since, into whichever block."""
        if not hasattr(self, "manager"):
            return
        for known in self.open.values():
            for position in range(0 if known.is_suspended else known.num_computed):
                expected = self.kv_of(known.space, known.tokens, position)
                assert self.slots[self.slot(known.table, position)] == expected

    @invariant()
    def counters_are_those_of_the_model(self):
        if not hasattr(self, "manager"):
            return
        stats = self.manager.stats()
        assert stats.num_free + stats.num_cached + stats.num_held == self.num_blocks
        assert stats.num_held >= len(self.held())
        assert stats.num_sequences == len(self.open)
        waste = sum(
            len(known.table) * self.block_size - known.length
            for known in self.open.values()
            if not known.is_suspended
        )
        assert stats.num_waste_slots == waste
        assert waste <= (self.block_size - 1) * len(self.open)

    @invariant()
    def the_list_of_sequences_is_the_models(self):
        if not hasattr(self, "manager"):
            return
        listed = {
            info.sequence_id: (info.length, info.num_computed_tokens, info.block_ids)
            for info in self.manager.list_sequences(1000)[0]
        }
        assert listed == {
            sequence_id: (known.length, known.num_reported, known.table)
            for sequence_id, known in self.open.items()
        }

    @invariant()
    def pins_keep_what_they_have(self):
        """Until they end, what is pinned can be found, whatever else happens."""
        if not hasattr(self, "manager"):
            return
        for pin in self.manager.list_pins():
            space, tokens, until = self.pins[pin.pin_id]
            assert until > self.now
            held = self.manager._attached.state.pins.get(pin.pin_id).block_ids
            for position in range(pin.num_cached_tokens):
                expected = self.kv_of(space, tokens, position)
                assert self.slots[self.slot(held, position)] == expected
