"""Who computes what in the next step, and who gets memory for the one after.

    queue ──opens──▶ running ──────end──────▶ releases ──closes──▶ gone
      ▲ │               │
      │ └──resumes──▶   │
      └───suspends──────┘

The engine alternates `plan_step`, `plan_update` (while the step runs),
`apply_update` and `apply_result`. All decisions are here; nothing here waits.
docs/scheduling.md explains the policy.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

from gateway.admission import Admission
from gateway.copies import CopyQueue
from gateway.decoding import Advance, Emission, Fork, advance_beams, append
from gateway.errors import (
    GatewayError,
    GenerationFailed,
    InvalidField,
    QueueFull,
    WorkerUnavailable,
)
from gateway.group import SequenceGroup, Stage
from gateway.limits import Limits
from gateway.next_update import NextUpdate
from gateway.pace import Pace
from gateway.ports import (
    ModelInfo,
    Refusal,
    Step,
    StepResult,
    SuspendedSequence,
    Update,
    UpdateResult,
)
from gateway.preemption import Preemption, choose_victim
from gateway.sequence import Sequence
from gateway.speculation import Speculator
from gateway.stats import PreemptionStats
from gateway.step_builder import StepBuilder
from gateway.types import GenerationRequest

_MAX_LOSSES = 3

# Refusals that more room helps against.
_NO_ROOM = frozenset({"OUT_OF_BLOCKS", "QUOTA_EXCEEDED"})
_NEVER = frozenset({"PROMPT_EXCEEDS_POOL", "INVALID_REQUEST"})  # an open that no retry can help
_POOL_HELD = "the page pool is full and none of it is ours to give back"


class Scheduler:
    """Iteration-level batching of sequence groups. Synchronous and deterministic.

    Invariants: a group is in the queue, running, or named in an update under way, as its
    stage says; running groups are in the order of their keys.
    """

    def __init__(
        self,
        limits: Limits,
        eos_ids: Iterable[int],
        owner: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`owner` makes sequence ids unique among all drivers that a kvstore has seen."""
        self._limits = limits
        self._max_running = min(limits.max_running, limits.token_budget)
        self._eos_ids = frozenset(eos_ids)
        self._clock, self._arrivals = clock, itertools.count()
        self._block_size, self._num_blocks, self._fingerprint = 1, 0, b""  # until `attach`
        self._admission = Admission(limits, owner)
        self._running: list[SequenceGroup] = []
        self._by_id: dict[str, Sequence] = {}  # with a table, or forked in the next update
        self._suspending: dict[str, Sequence] = {}  # by id, asked for or to be asked for
        self._next = NextUpdate()
        self._forgets: list[str] = []  # for the next step
        self._asked: dict[str, int] = {}  # lengths in the update under way
        self._forking: dict[str, Fork] = {}  # in the update under way, by the child's id
        self._copies = CopyQueue()
        self._pace = Pace(limits.step_target)
        self.speculator = Speculator(limits.speculation, limits.num_drafts)
        self._builder = StepBuilder(limits.token_budget, self._pace, self.speculator)
        self._preemption = Preemption()
        self._prefill = (0, 0.0)  # tokens and seconds of the last step that was mostly one
        self._failures: list[tuple[SequenceGroup, GatewayError]] = []
        self._num_swaps = self._num_recomputes = self._num_resumes = 0  # of sequences
        self._num_preemptions = 0  # of groups

    @property
    def num_waiting(self) -> int:
        return len(self._admission.queue)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks or will, and places that are kept for others."""
        return sum(group.width for group in self._running) + self._admission.num_asked

    @property
    def num_table_blocks(self) -> int:
        return sum(len(s.block_ids) for group in self._running for s in group.sequences)

    def preemption_stats(self) -> PreemptionStats:
        return PreemptionStats(
            self._num_preemptions, self._num_swaps, self._num_recomputes, self._num_resumes
        )

    @property
    def max_width(self) -> int:
        """Most sequences that a request may run at once."""
        return self._max_running

    @property
    def is_blocked(self) -> bool:
        """Others hold the pool: nothing of ours runs, and the queue's head finds no room."""
        return self._admission.is_full and not self.num_running

    # --- what the engine tells ------------------------------------------------

    def attach(self, model: ModelInfo) -> None:
        """Work for this model and pool from now on. Only while nothing runs."""
        self._block_size, self._num_blocks = model.pool.block_size, model.pool.num_blocks
        self._fingerprint = model.fingerprint
        self.speculator.attach(model)

    def add(self, request: GenerationRequest, max_length: int) -> SequenceGroup:
        """Queue a request. Raises QueueFull, changing nothing."""
        if self.num_waiting >= self._limits.max_waiting:
            raise QueueFull(limit=self._limits.max_waiting)
        group = SequenceGroup(
            request,
            max_length,
            self._eos_ids,
            arrival=self._clock(),
            number=next(self._arrivals),
            ageing=self._limits.ageing,
        )
        self._admission.queue.add(group)
        return group

    def end(self, group: SequenceGroup) -> None:
        """Stop working on a group. Its blocks go once no step uses them. Safe to repeat."""
        stage, group.stage = group.stage, Stage.ENDED
        if stage in (Stage.WAITING, Stage.SUSPENDED):
            self._admission.queue.remove(group)
            self._close_suspended(group)
        elif stage is Stage.RUNNING:
            for sequence in list(group.sequences):
                self.end_sequence(sequence)

    def _close_suspended(self, group: SequenceGroup) -> None:
        if group.is_suspended:
            self._next.closes += [sequence.id for sequence in group.sequences]

    def end_sequence(self, sequence: Sequence) -> None:
        """Stop working on one of a group's sequences. Safe to repeat."""
        sequence.is_ended = True
        # A fork that was asked for is closed when the answer is there.
        is_asked = sequence.id in self._forking
        if sequence.id in self._by_id and sequence.chunk is None and not is_asked:
            self._release(sequence)

    def end_choice(self, group: SequenceGroup, index: int) -> None:
        """Stop working on a continuation that has ended. Safe to repeat."""
        for sequence in [s for s in group.sequences if s.index == index]:
            self.end_sequence(sequence)

    def take_failures(self) -> list[tuple[SequenceGroup, GatewayError]]:
        """Groups that ended with an error since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def abandon(self, *, is_theirs: bool = False) -> list[SequenceGroup]:
        """The workers are lost: forget all that is open.

        What was running or being opened waits again, in its place in the queue, with the
        tokens it has; but not for ever without a token in between, since it may be this
        that the workers cannot bear. `is_theirs`: it is known to be what was running.
        Returns the groups that have ended.
        """
        asked = {sequence.group: None for sequence in self._admission.asked.values()}
        asked |= {sequence.group: None for sequence in self._suspending.values()}
        lost: list[SequenceGroup] = []
        for group in [*self._running, *asked]:
            group.num_losses += 1
            is_given_up = is_theirs and group.stage is Stage.RUNNING
            if group.is_ended:
                continue
            if is_given_up or group.num_losses >= _MAX_LOSSES:
                group.stage = Stage.ENDED
                lost.append(group)
            else:
                self._admission.wait_again(group)
        for group in self._admission.queue:
            group.stage, group.is_suspended = Stage.WAITING, False
            group.sequences = [s for s in group.sequences if not s.is_ended]
            for sequence in group.sequences:
                sequence.forget()
        self._forget_all()
        return lost

    def _forget_all(self) -> None:
        for collection in (self._running, self._by_id, self._suspending, self._forgets):
            collection.clear()
        self._next = NextUpdate()
        self._asked, self._forking = {}, {}
        self._copies = CopyQueue()
        self._preemption = Preemption()
        self._builder.shared.clear()
        self._admission.reset()

    # --- plans ----------------------------------------------------------------

    def plan_step(self) -> Step | None:
        """Decodes first, then prefills in chunks, each in order, within the budget."""
        self._make_room()
        if not self._builder.fill(self._running):
            return None
        forgets, self._forgets = self._forgets, []
        return self._builder.step(tuple(forgets), self._copies.start_step())

    def plan_update(self) -> Update:
        """What the kvstore must do while the step runs, so that the next one can write."""
        plans, self._next = self._next, NextUpdate()
        needs_blocks = plans.plan_lengths(self._running, self.speculator, self._block_size)
        entries = self._admission.plan(
            num_running=sum(group.width for group in self._running),
            max_running=self._max_running,
            backlog=sum(s.num_pending_after_step for g in self._running for s in g.sequences),
            fingerprint=self._fingerprint,
        )
        # Within a block, new lengths go along with what must be sent, and are not worth a
        # call of their own.
        changes = (plans.commits, plans.closes, plans.suspends, plans.forks, plans.truncates)
        if not (needs_blocks or any(changes) or any(entries)):
            plans.extends = []
        self._asked = {plan.sequence_id: plan.length for plan in plans.extends}
        self._forking = {fork.child.id: fork for fork in plans.forks}
        transfer, copy_seconds = self._copies.take_done()
        prefill, self._prefill = self._prefill, (0, 0.0)
        return Update(
            commits=plans.commits,
            forks=plans.fork_plans(),
            closes=plans.closes,
            truncates=plans.truncates,
            suspends=plans.suspends,
            extends=plans.extends,
            resumes=entries.resumes,
            opens=entries.opens,
            num_spare_blocks=self._num_spare_blocks(),
            completed_transfer=transfer,
            copy_seconds=copy_seconds,
            num_prefill_tokens=prefill[0],
            prefill_seconds=prefill[1],
        )

    def _num_spare_blocks(self) -> int:
        """What admission leaves for those that run, so that it is not at once at their cost."""
        return int(self._limits.watermark * self._num_blocks) if self._running else 0

    def _make_room(self) -> None:
        """Suspend a group if others were refused slots that they need now.

        What has ended or is being suspended gives its blocks first.
        """
        if self._next.closes or self._suspending:
            return
        short = [s for g in self._running for s in g.sequences if s.lacks_slots]
        if not (short and self._preemption.is_needed(len(short))):
            return
        is_quota = all(sequence.refusal == "QUOTA_EXCEEDED" for sequence in short)
        tenant = short[0].group.request.tenant if is_quota else None
        victim = choose_victim(self._running, ageing=self._limits.ageing, tenant=tenant)
        if victim is None and not self._admission.asked:
            self._fail(short[0].group, WorkerUnavailable(_POOL_HELD))
        elif victim is not None and not any(f.child.group is victim for f in self._next.forks):
            self._suspend(victim)

    def _suspend(self, group: SequenceGroup) -> None:
        group.stage = Stage.SUSPENDING
        self._running.remove(group)
        for sequence in group.sequences:
            if commit := sequence.take_commit(self._block_size, whole=True):
                self._next.commits.append(commit)
            self._forget_on_compute(sequence)
            self._builder.shared.forget(sequence)
            del self._by_id[sequence.id]
            self._suspending[sequence.id] = sequence
            sequence.leave_pool()
        self._next.suspends.append(group.sequences[0].id)
        self._admission.note_no_room(None, "OUT_OF_BLOCKS")
        self._num_preemptions += 1

    # --- what came of it ------------------------------------------------------

    def apply_update(self, result: UpdateResult) -> list[SequenceGroup]:
        """Take in the kvstore's answer. Returns the groups it opened for the first time.

        Raises WorkerUnavailable if the kvstore does not know what we know.
        """
        self._preemption.answer()
        self._apply_refusals(result.refused)
        self._copies.add(result)
        self._apply_suspended(result.suspended)
        for forked in result.forked:
            fork = self._forking.pop(forked.sequence_id)
            fork.child.fork_with(forked.block_ids, fork.length, self._block_size)
        for extended in result.extended:
            if sequence := self._by_id.get(extended.sequence_id):
                self._preemption.grant(len(extended.block_ids))
                sequence.grow(extended.first_index, extended.block_ids, self._block_size)
        for sequence_id, length in self._asked.items():
            if sequence := self._by_id.get(sequence_id):
                sequence.grant(length, self._block_size)
        self._asked = {}
        back: list[Sequence] = []
        for resumed in result.resumed:
            sequence = self._admission.asked.pop(resumed.sequence_id)
            sequence.resume_with(resumed, self._block_size)
            self._begin(sequence)
            back.append(sequence)
        self._num_resumes += len(back)
        self._builder.shared.add(back, self._block_size)
        started: list[SequenceGroup] = []
        for opened in result.opened:
            sequence = self._admission.asked.pop(opened.sequence_id)
            sequence.open_with(opened, self._block_size)
            self._begin(sequence)
            group = sequence.group
            if not (group.was_opened or group.is_ended):
                group.was_opened = True
                started.append(group)
        self._end_late()
        return started

    def _begin(self, sequence: Sequence) -> None:
        """It has a table: its group runs."""
        group = sequence.group
        self._by_id[sequence.id] = sequence
        group.is_suspended = False
        if group.stage in (Stage.OPENING, Stage.RESUMING):
            group.stage = Stage.RUNNING
        if group not in self._running:
            bisect.insort(self._running, group)

    def _end_late(self) -> None:
        """Release what ended while an update was under way."""
        for group in list(self._running):
            for sequence in list(group.sequences):
                if (group.is_ended or sequence.is_ended) and sequence.chunk is None:
                    sequence.is_ended = True
                    self._release(sequence)

    def _apply_suspended(self, suspended: Items[SuspendedSequence]) -> None:
        groups: dict[SequenceGroup, None] = {}
        for one in suspended:
            sequence = self._suspending.pop(one.sequence_id)
            self._preemption.promise(one.num_freed_blocks)
            self._num_swaps += one.is_swapped
            self._num_recomputes += not one.is_swapped
            groups[sequence.group] = None
        for group in groups:
            group.is_suspended = True
            if group.is_ended:
                self._close_suspended(group)
            else:
                self._admission.wait_again(group)

    def apply_result(self, result: StepResult) -> list[Emission]:
        """Take in a step's tokens, in the order of its chunks.

        Raises WorkerUnavailable if they are not those that were asked for.
        """
        stepped = self._builder.finish(result)
        self._copies.end_step(result.copy_elapsed)
        self._prefill = self._builder.prefill_measured(result)
        emissions = [
            Emission(self._by_id[scored.sequence_id].group, prompt=scored)
            for scored in result.prompt_logprobs
        ]
        failed: dict[SequenceGroup, GatewayError] = {}
        for failure in result.failures:
            group = self._by_id[failure.sequence_id].group
            failed[group] = GenerationFailed(failure.message, reason=failure.reason)
        beams: dict[SequenceGroup, None] = {}
        for sequence, drawn in stepped:
            group = sequence.group
            if group.is_ended or sequence.is_ended:
                sequence.is_ended = True
                self._release(sequence)
            elif drawn:
                group.num_losses = 0
                self._take_in(append(sequence, drawn), emissions)
            elif group.beams is not None and sequence.num_pending == 0:
                beams[group] = None
        for group, error in failed.items():
            if not group.is_ended:
                self._fail(group, error)
            beams.pop(group, None)
        for group in beams:
            group.num_losses = 0
            found = {one.sequence_id: one for one in result.candidates}
            self._take_in(advance_beams(group, found), emissions)
        return emissions

    def _take_in(self, advance: Advance, emissions: list[Emission]) -> None:
        emissions += advance.emissions
        for fork in advance.forks:
            if commit := fork.source.take_commit(self._block_size, whole=True):
                self._next.commits.append(commit)
            child = fork.child
            child.id = self._admission.new_id(child.group)
            self._by_id[child.id] = child
            if child not in child.group.sequences:
                child.group.sequences.append(child)
            self._next.forks.append(fork)
        for sequence in advance.ended:
            self.end_sequence(sequence)

    def _apply_refusals(self, refusals: list[Refusal]) -> None:
        """No room is an answer; anything else means that the kvstore lost our sequences."""
        asked = self._admission.asked
        for refusal in refusals:
            is_open = refusal.sequence_id in asked
            is_room = is_open or refusal.sequence_id in self._asked
            if not (
                (is_room and refusal.reason in _NO_ROOM) or (is_open and refusal.reason in _NEVER)
            ):
                raise WorkerUnavailable(f"the kvstore refused: {refusal.reason} {refusal.message}")
        back: dict[SequenceGroup, Refusal] = {}
        for refusal in refusals:
            if self._asked.pop(refusal.sequence_id, None) is not None:
                if sequence := self._by_id.get(refusal.sequence_id):
                    sequence.refusal = refusal.reason
            elif refusal.sequence_id in asked:
                back.setdefault(asked[refusal.sequence_id].group, refusal)
        for group, refusal in back.items():
            self._take_back(group, refusal)

    def _take_back(self, group: SequenceGroup, refusal: Refusal) -> None:
        """A group that could not be opened or resumed."""
        for sequence in group.sequences:
            self._admission.asked.pop(sequence.id, None)
        if refusal.reason in _NO_ROOM:
            self._admission.note_no_room(group, refusal.reason)
        elif not group.is_ended:
            error = InvalidField("prompt", refusal.message, reason=refusal.reason)
            self._failures.append((group, error))
            group.stage = Stage.ENDED
        if group.is_ended:
            self._close_suspended(group)
            return
        if not group.is_suspended:
            for sequence in group.sequences:
                sequence.forget()
        self._admission.wait_again(group)

    def _fail(self, group: SequenceGroup, error: GatewayError) -> None:
        self._failures.append((group, error))
        self.end(group)

    def _release(self, sequence: Sequence) -> None:
        """Give the blocks back with the next update; full ones stay findable."""
        if commit := sequence.take_commit(self._block_size):
            self._next.commits.append(commit)
        self._next.forks = [fork for fork in self._next.forks if fork.child is not sequence]
        self._next.closes.append(sequence.id)
        self._preemption.promise(len(sequence.block_ids))
        self._forget_on_compute(sequence)
        del self._by_id[sequence.id]
        self.speculator.forget(sequence)
        self._builder.shared.forget(sequence)
        self._admission.note_end()
        group = sequence.group
        if sequence in group.sequences:
            group.sequences.remove(sequence)
        if not group.sequences:
            group.stage = Stage.ENDED
            if group in self._running:
                self._running.remove(group)

    def _forget_on_compute(self, sequence: Sequence) -> None:
        if sequence.num_blocks_sent is not None:
            self._forgets.append(sequence.id)
