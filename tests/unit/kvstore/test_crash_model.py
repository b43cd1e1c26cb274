"""The page manager's model, with managers that are killed in the middle of a call."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvstore.errors import KvStoreError
from kvstore.manager import PageManager
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
from tests.unit.kvstore.crashing import Fuse, Killed, copy_of
from tests.unit.kvstore.manager_model import Known
from tests.unit.kvstore.test_manager_model import PageManagerMachine


@dataclass
class Call:
    """A call that can be made again. `run` returns the copies to run and their transfer."""

    run: object
    opens: list[OpenPlan] = field(default_factory=list)
    forks: list[ForkPlan] = field(default_factory=list)
    pins: list[PinPlan] = field(default_factory=list)
    is_atomic: bool = True  # all of it is there after a crash, or nothing


class CrashingMachine(PageManagerMachine):
    """Every rule of the model, and calls that a manager is killed in.

    What the call would have done is learnt from a twin over a copy of what was there.
    """

    def start_manager(self) -> None:
        self.fuse = Fuse()
        self.manager = self.manager_over(self.storage, self.fuse)

    def manager_over(self, storage, fuse) -> PageManager:
        return PageManager(self.options, storage, reached=fuse, clock=lambda: self.now)

    @rule(data=st.data())
    def die_in_a_call(self, data):
        call = self.draw_call(data)
        left = copy_of(self.storage)
        self.restart(repair=False)
        twin_fuse = Fuse()
        twin = self.manager_over(left, twin_fuse)
        before = self.seen(self.manager)
        twin_fuse.light()
        if not self.succeeds(call, twin):
            return
        after = self.seen(twin)
        if not twin_fuse.points:
            return
        self.forget_what_nobody_keeps()
        self.fuse.light(data.draw(st.integers(1, len(twin_fuse.points)), "dies at"))
        try:
            call.run(self.manager)
        except Killed:
            self.start_manager()
        else:
            raise AssertionError("the manager and its twin differ")
        assert self.manager.audit() == []
        self.compare(call, before, after)
        self.follow_call(call)
        self.every_sequence_reads_its_own_kv()
        self.repeat(call, after)

    def draw_call(self, data) -> Call:
        kinds = [self.an_open, self.a_pin, self.a_lease, self.a_completion]
        if self.resident:
            kinds += [self.an_extension, self.a_commit, self.a_fork, self.a_truncation]
            kinds += [self.a_closing, self.a_suspension, self.a_step]
        if self.suspended:
            kinds += [self.a_resumption] * 3
        return data.draw(st.sampled_from(kinds), "call")(data)

    def an_open(self, data) -> Call:
        plans = [self.draw_plan(data) for _ in range(data.draw(st.integers(1, 2), "plans"))]
        return Call(lambda m: (m.open_sequences(plans), [], 0)[1:], opens=plans)

    def an_extension(self, data) -> Call:
        length = self.open[key := self.pick(data)].length + data.draw(st.integers(1, 20), "more")
        return Call(lambda m: (m.extend_sequences([ExtendPlan(key, length)]), [], 0)[1:])

    def a_commit(self, data) -> Call:
        known = self.open[key := self.pick(data)]
        count = min(known.length, len(known.tokens))
        self.write_up_to(known, count)
        return Call(lambda m: (m.commit_blocks([CommitPlan(key, count)]), [], 0)[1:])

    def a_fork(self, data) -> Call:
        self.next_id += 1
        plan = ForkPlan(self.pick(data), f"k{self.next_id}")
        return Call(lambda m: (m.fork_sequences([plan]), [], 0)[1:], forks=[plan])

    def a_truncation(self, data) -> Call:
        length = data.draw(st.integers(1, self.open[key := self.pick(data)].length), "length")
        return Call(lambda m: (m.truncate_sequences([TruncatePlan(key, length)]), [], 0)[1:])

    def a_closing(self, data) -> Call:
        ids = sorted(data.draw(st.sets(st.sampled_from(self.resident), min_size=1), "ids"))
        return Call(lambda m: (m.close_sequences(ids), [], 0)[1:])

    def a_suspension(self, data) -> Call:
        ids = data.draw(st.sets(st.sampled_from(self.resident), min_size=1, max_size=3), "ids")
        mode = data.draw(st.sampled_from(SuspendMode), "mode")
        plans = [SuspendPlan(key, mode) for key in sorted(ids)]
        return Call(lambda m: m.suspend_sequences(plans, runs_copies=True)[1:])

    def a_resumption(self, data) -> Call:
        ids = sorted(data.draw(st.sets(st.sampled_from(self.suspended), min_size=1), "ids"))
        runs_copies = data.draw(st.booleans(), "runs copies")
        return Call(lambda m: m.resume_sequences(ids, runs_copies=runs_copies)[1:])

    def a_step(self, data) -> Call:
        """Another sequence for each kind of change, so that each is there or not."""
        ids = data.draw(st.permutations(self.resident), "ids")
        plan, changes = self.draw_plan(data), {}
        for name, key in zip(("closes", "extends", "commits"), ids, strict=False):
            known = self.open[key]
            count = min(known.length, len(known.tokens))
            if name == "commits":
                self.write_up_to(known, count)
            its = {"extends": ExtendPlan(key, known.length + 9), "commits": CommitPlan(key, count)}
            changes[name] = [its.get(name, key)]
        update = Update(opens=[plan], runs_copies=True, **changes)

        def run(manager):
            result = manager.update(update)
            return result.copies, result.transfer

        return Call(run, opens=[plan], is_atomic=False)

    def a_pin(self, data) -> Call:
        tokens = [data.draw(st.integers(0, 1), "kind")] * self.block_size * 2
        plan = PinPlan(f"p{len(self.pins)}", "owner", 5.0, self.draw_plan(data).namespace, tokens)
        return Call(lambda m: (m.pin_prefix(plan), [], 0)[1:], pins=[plan])

    def a_lease(self, data) -> Call:
        adopt = data.draw(st.booleans(), "adopt")
        return Call(lambda m: (m.acquire_driver_lease(adopt=adopt), [], 0)[1:])

    def a_completion(self, data) -> Call:
        """Of copies that were made for an earlier manager."""
        number = self.transfer
        return Call(lambda m: (m.complete_transfer(number, 0.001), [], 0)[1:])

    # --- before and after ---------------------------------------------------

    def write_up_to(self, known: Known, count: int) -> None:
        """What a driver does before it commits."""
        for position in range(known.num_computed, count):
            kv = self.kv_of(known.space, known.tokens, position)
            self.slots[self.slot(known.table, position)] = kv
        known.num_computed = max(known.num_computed, count)

    def succeeds(self, call: Call, manager: PageManager) -> bool:
        try:
            call.run(manager)
        except KvStoreError:
            return False
        return True

    def seen(self, manager: PageManager):
        listed, _ = manager.list_sequences(1000, with_tokens=True)
        return {one.sequence_id: one for one in listed}, manager.list_pins()

    def forget_what_nobody_keeps(self) -> None:
        """Others may have written to free blocks, for all that anybody may rely on."""
        frames = self.manager._attached.state.blocks.frames
        free = (frames.ref_counts == 0) & ~frames.findable
        self.clear(free.nonzero()[0].tolist())

    def compare(self, call: Call, before, after) -> None:
        sequences, pins = self.seen(self.manager)
        for key in {*before[0], *after[0], *sequences}:
            assert sequences.get(key) in (before[0].get(key), after[0].get(key))
        assert {pin.pin_id for pin in pins} in (
            {pin.pin_id for pin in before[1]},
            {pin.pin_id for pin in after[1]},
        )
        if call.is_atomic:
            assert sequences in (before[0], after[0])

    def follow_call(self, call: Call) -> None:
        """Know of each sequence what the manager says: answers may have been lost."""
        sequences, _ = self.seen(self.manager)
        for plan in call.opens:
            prompt = list(plan.token_ids)
            new = Known(plan.namespace, prompt, prompt, 0, 0, 0, group=plan.group)
            self.open.setdefault(plan.sequence_id, new)
        for plan in call.forks:
            source = self.open[plan.source_id]
            new = Known(source.space, source.prompt, source.tokens, 0, 0, 0, group=source.group)
            self.open.setdefault(plan.sequence_id, new)
        for plan in call.pins:
            its = (plan.namespace, list(plan.token_ids), self.now + plan.ttl_seconds)
            self.pins.setdefault(plan.pin_id, its)
        self.open = {key: known for key, known in self.open.items() if key in sequences}
        for key, one in sequences.items():
            known = self.open[key]
            if known.table != one.block_ids or known.length != one.length:
                known.opened = None
            same = known.table == one.block_ids
            known.table, known.tokens = list(one.block_ids), list(one.tokens)
            known.length, known.is_suspended = one.length, one.is_suspended
            known.num_reported = one.num_computed_tokens
            most = min(known.num_computed, known.length) if same else 0
            known.num_computed = max(known.num_reported, most)
            known.tail_may_be_found = True
            for count in range(known.num_reported // self.block_size):
                self.computed.add(self.prefix(known.space, known.tokens, count + 1))

    def repeat(self, call: Call, after) -> None:
        """The call is done, or is refused because it was done: what is asked for is there."""
        reason = ""
        try:
            copies, transfer = call.run(self.manager)
        except KvStoreError as error:
            reason = error.reason
        else:
            self.run(copies)
            self.transfer = max(self.transfer, transfer)
        done = {"SEQUENCE_EXISTS", "SEQUENCE_SUSPENDED", "SEQUENCE_NOT_SUSPENDED"}
        # What the first try has evicted, the second one may not find any more.
        assert reason in {"", *done, "OUT_OF_BLOCKS", "QUOTA_EXCEEDED"}
        if call.is_atomic and (reason in done or not reason):
            assert self.seen(self.manager)[0].keys() == after[0].keys()
        self.follow_call(call)


def case(size: int, num_examples: int):
    machine = type(f"Crashing{size}", (CrashingMachine,), {"block_size": size})
    machine.TestCase.settings = settings(
        max_examples=num_examples,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return machine.TestCase


TestCrashes8, TestCrashes16 = case(8, 100), case(16, 50)
