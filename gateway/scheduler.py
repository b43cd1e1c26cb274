"""Who computes what in the next step, and who gets memory for the one after.

    waiting ──opens──▶ opening ──▶ running ──end──▶ ended ──closes──▶ gone
       ▲                              │
       └────────── preempted ─────────┘

The engine alternates `plan_step`, `plan_update` (while the step runs),
`apply_update` and `apply_result`. All decisions are here; nothing here waits.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from gateway.copies import CopyQueue
from gateway.errors import GatewayError, InvalidField, QueueFull, WorkerUnavailable
from gateway.ports import (
    Chunk,
    CommitPlan,
    ExtendPlan,
    ModelInfo,
    Namespace,
    OpenPlan,
    Refusal,
    SampledToken,
    Step,
    StepResult,
    Update,
    UpdateResult,
)
from gateway.sequence import Sequence
from gateway.types import FinishReason

_MAX_LOSSES = 3

# Refusals that more room helps against.
_NO_ROOM = frozenset({"OUT_OF_BLOCKS", "QUOTA_EXCEEDED"})

# Tokens that a step must have for its time to say what prefills cost.
_LEAST_PREFILL = 64

_NEVER = ("PROMPT_EXCEEDS_POOL", "INVALID_REQUEST")  # an open that no retry can help


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a step and of the queue.

    | limit        | default | meaning                                          |
    |--------------|---------|--------------------------------------------------|
    | token_budget | 512     | tokens in a step                                 |
    | max_running  | 64      | sequences that hold blocks; never more than      |
    |              |         | token_budget, so that each can go on every step  |
    | max_waiting  | 256     | requests that wait; more are refused             |
    """

    token_budget: int = 512
    max_running: int = 64
    max_waiting: int = 256

    def __post_init__(self) -> None:
        if min(self.token_budget, self.max_running, self.max_waiting) < 1:
            raise ValueError("token_budget, max_running and max_waiting must be at least 1")


@dataclass(frozen=True, slots=True)
class Emission:
    """A token that a step drew, and whether it is the sequence's last."""

    sequence: Sequence
    token: SampledToken
    finish: FinishReason | None


class Scheduler:
    """Iteration-level batching, first come, first served. Synchronous and deterministic.

    Invariants: a sequence is in one of waiting, opening, running, ended; running is
    in the order of arrival, and everything waiting came later.
    """

    def __init__(self, limits: Limits, eos_ids: Iterable[int], owner: str) -> None:
        """`owner` makes sequence ids unique among all drivers that a kvstore has seen."""
        self._limits = limits
        self._max_running = min(limits.max_running, limits.token_budget)
        self._eos_ids = frozenset(eos_ids)
        self._owner, self._numbers = owner, itertools.count()
        self._step_ids = itertools.count(1)
        self._block_size, self._fingerprint = 1, b""  # until `attach`
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()  # by request id
        self._opening: dict[str, Sequence] = {}  # by sequence id, as all below
        self._running: dict[str, Sequence] = {}
        self._releases: list[tuple[str, CommitPlan | None]] = []  # for the next update
        self._forgets: list[str] = []  # for the next step
        self._asked: dict[str, int] = {}  # lengths in the update under way
        self._copies = CopyQueue()
        self._prefill = (0, 0.0)  # tokens and seconds of the last step that was mostly one
        self._failures: list[tuple[Sequence, GatewayError]] = []
        self._admits = True  # False: no room, and no sequence has ended since
        self._has_ended = False  # a sequence ended since the last update
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running) + len(self._opening)

    @property
    def num_table_blocks(self) -> int:
        return sum(len(sequence.block_ids) for sequence in self._running.values())

    @property
    def is_blocked(self) -> bool:
        """Others hold the pool: nothing of ours runs, and the queue's head finds no room."""
        return not self._admits and not self.num_running

    # --- what the engine tells ------------------------------------------------

    def attach(self, model: ModelInfo) -> None:
        """Work for this model and pool from now on. Only while nothing runs."""
        self._block_size, self._fingerprint = model.pool.block_size, model.fingerprint

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises QueueFull, changing nothing."""
        if len(self._waiting) >= self._limits.max_waiting:
            raise QueueFull(limit=self._limits.max_waiting)
        self._waiting[sequence.request.request_id] = sequence

    def end(self, sequence: Sequence) -> None:
        """Stop working on a sequence. Its blocks go once no step uses them. Safe to repeat."""
        if sequence.is_ended:
            return
        sequence.is_ended = True
        if not sequence.id:
            del self._waiting[sequence.request.request_id]
        elif sequence.id in self._running and sequence.chunk is None:
            self._retire(sequence)

    def take_failures(self) -> list[tuple[Sequence, GatewayError]]:
        """Sequences that ended with an error since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def abandon(self, *, is_theirs: bool = False) -> list[Sequence]:
        """The workers are lost: forget all that is open.

        What was running or being opened waits again, in the order of arrival, with the
        tokens it has; but not for ever without a token in between, since it may be this
        that the workers cannot bear. `is_theirs`: it is known to be what was running.
        Returns the sequences that have ended.
        """
        lost: list[Sequence] = []
        again: list[Sequence] = []
        for sequence in self._running.values():
            sequence.num_losses += 1
            is_given_up = is_theirs or sequence.num_losses >= _MAX_LOSSES
            (lost if is_given_up else again).append(sequence)
        for sequence in self._opening.values():
            sequence.num_losses += 1
            (again if sequence.num_losses < _MAX_LOSSES else lost).append(sequence)
        lost = [sequence for sequence in lost if not sequence.is_ended]
        for sequence in lost:
            sequence.is_ended = True
        self._running.clear()
        self._opening.clear()
        self._wait_again(again)
        self._releases.clear()
        self._asked = {}
        self._forgets.clear()
        self._copies = CopyQueue()
        self._admits = True
        return lost

    # --- the policy -----------------------------------------------------------

    def plan_step(self) -> Step | None:
        """Decodes first, then prefills in chunks, each in order of arrival, within the budget."""
        self._make_room()
        budget = self._limits.token_budget
        batch: list[Sequence] = []
        chunks: list[Chunk] = []
        # A stable sort: order of arrival within decodes and within prefills.
        for sequence in sorted(self._running.values(), key=lambda s: s.num_pending > 1):
            sequence.chunk = sequence.next_chunk(budget)
            if sequence.chunk is not None:
                budget -= sequence.chunk.num_tokens
                batch.append(sequence)
                chunks.append(sequence.chunk)
        if not chunks:
            return None
        forgets, self._forgets = self._forgets, []
        extensions = [e for sequence in batch if (e := sequence.take_extension())]
        states = [s for sequence in batch if (s := sequence.take_state())]
        copies = self._copies.start_step()
        return Step(next(self._step_ids), tuple(forgets), states, extensions, copies, chunks)

    def plan_update(self) -> Update:
        """What the kvstore must do while the step runs, so that the next one can write."""
        releases, self._releases = self._releases, []
        closes = [sequence_id for sequence_id, _ in releases]
        commits = [commit for _, commit in releases if commit]
        extends, needs_blocks = [], False
        for sequence in self._running.values():
            if commit := sequence.take_commit(self._block_size):
                commits.append(commit)
            length = None if sequence.is_ended else sequence.next_length()
            if length is not None:
                extends.append(ExtendPlan(sequence.id, length))
                needs_blocks = needs_blocks or length > sequence.num_slots
        opens = self._plan_opens()
        # Within a block, new lengths only keep the kvstore's figures fresh: they go
        # along with what must be sent, and are not worth a call of their own.
        if not (commits or closes or needs_blocks or opens):
            extends = []
        self._asked = {plan.sequence_id: plan.length for plan in extends}
        prefill, self._prefill = self._prefill, (0, 0.0)
        transfer, copy_seconds = self._copies.take_done()
        return Update(
            commits=commits,
            closes=closes,
            extends=extends,
            opens=opens,
            completed_transfer=transfer,
            copy_seconds=copy_seconds,
            num_prefill_tokens=prefill[0],
            prefill_seconds=prefill[1],
        )

    def _plan_opens(self) -> list[OpenPlan]:
        """Admit from the head of the queue.

        No more than a step or so of prompts at once: one that is opened early holds
        blocks it cannot use yet and misses what those before it are computing.
        """
        if self._has_ended or not self._running:
            self._admits = True
        self._has_ended = False
        plans: list[OpenPlan] = []
        backlog = sum(sequence.num_pending_after_step for sequence in self._running.values())
        while (
            self._admits
            and self._waiting
            and backlog < self._limits.token_budget
            and self.num_running < self._max_running
        ):
            _, sequence = self._waiting.popitem(last=False)
            sequence.id = f"{sequence.request.request_id}.{self._owner}.{next(self._numbers)}"
            self._opening[sequence.id] = sequence
            backlog += len(sequence.token_ids)
            namespace = Namespace(self._fingerprint, tenant=sequence.request.tenant)
            plans.append(
                OpenPlan(
                    sequence.id,
                    tuple(sequence.token_ids),
                    namespace,
                    sequence.log_id,
                    sequence.was_preempted,
                )
            )
        return plans

    def _make_room(self) -> None:
        """Preempt the latest arrival if a sequence was refused the slot it needs now.

        One at a time: only the kvstore knows how many of its blocks are shared, so
        we see what comes free before taking another. For the same reason what has
        ended goes first. Nobody is admitted until a sequence ends: the victim needs
        more than is left of what it gave, and all others came later.
        """
        if self._releases or not any(s.lacks_slots for s in self._running.values()):
            return
        victim = next(reversed(self._running.values()))
        if len(self._running) == 1:
            error = WorkerUnavailable("the page pool is full and none of it is ours to give back")
            self._failures.append((victim, error))
            self.end(victim)
            return
        self._release(victim)
        victim.was_preempted = True
        self._wait_again([victim])
        self._admits = False
        self.num_preemptions += 1

    # --- what came of it ------------------------------------------------------

    def apply_update(self, result: UpdateResult) -> list[Sequence]:
        """Take in the kvstore's answer. Returns the sequences it opened.

        Raises WorkerUnavailable if the kvstore does not know what we know.
        """
        self._apply_refusals(result.refused)
        self._copies.add(result)
        for extended in result.extended:
            if sequence := self._running.get(extended.sequence_id):
                sequence.grow(extended.first_index, extended.block_ids, self._block_size)
        for sequence_id, length in self._asked.items():
            if sequence := self._running.get(sequence_id):
                sequence.length = length
        self._asked = {}
        started = []
        for opened in result.opened:
            sequence = self._opening.pop(opened.sequence_id)
            sequence.open_with(opened.block_ids, opened.num_cached_tokens, self._block_size)
            self._running[sequence.id] = sequence
            if sequence.is_ended:  # cancelled meanwhile
                self._retire(sequence)
            else:
                started.append(sequence)
        return started

    def apply_result(self, result: StepResult) -> list[Emission]:
        """Take in a step's tokens, in the order of its chunks.

        Raises WorkerUnavailable if they are not those that were asked for.
        """
        stepped = [s for s in self._running.values() if s.chunk]
        drawn = {token.sequence_id: token for token in result.tokens}
        if drawn.keys() != {s.id for s in stepped if s.chunk and s.chunk.sample}:
            raise WorkerUnavailable("compute answered with tokens of other sequences")
        self._copies.end_step(result.copy_elapsed)
        self._measure(stepped, result)
        emissions = []
        for sequence in stepped:
            assert sequence.chunk is not None
            sequence.num_computed += sequence.chunk.num_tokens
            sequence.chunk = None
            if sequence.is_ended:
                self._retire(sequence)
            elif token := drawn.get(sequence.id):
                sequence.token_ids.append(token.token_id)
                sequence.num_losses = 0
                finish = self._finish_of(sequence)
                if finish:
                    self.end(sequence)
                emissions.append(Emission(sequence, token, finish))
        return emissions

    def _measure(self, stepped: list[Sequence], result: StepResult) -> None:
        """Note what prefills cost, from steps that were hardly anything else."""
        num_tokens = sum(s.chunk.num_tokens for s in stepped if s.chunk)
        if num_tokens >= max(_LEAST_PREFILL, 4 * len(stepped)):
            self._prefill = (num_tokens, result.elapsed - result.copy_elapsed)

    def _finish_of(self, sequence: Sequence) -> FinishReason | None:
        if sequence.token_ids[-1] in self._eos_ids and not sequence.request.ignore_eos:
            return FinishReason.STOP
        if len(sequence.token_ids) >= sequence.max_length:
            return FinishReason.LENGTH
        return None

    def _apply_refusals(self, refusals: list[Refusal]) -> None:
        """No room is an answer; anything else means that the kvstore lost our sequences."""
        for refusal in refusals:
            is_open = refusal.sequence_id in self._opening
            if not (refusal.reason in _NO_ROOM or (is_open and refusal.reason in _NEVER)):
                raise WorkerUnavailable(f"the kvstore refused: {refusal.reason} {refusal.message}")
        delayed: list[Sequence] = []
        for refusal in refusals:
            sequence = self._opening.pop(refusal.sequence_id, None)
            if sequence is None:
                self._asked.pop(refusal.sequence_id, None)
            elif refusal.reason in _NO_ROOM:
                delayed.append(sequence)
            else:
                sequence.is_ended = True
                error = InvalidField("prompt", refusal.message, reason=refusal.reason)
                self._failures.append((sequence, error))
        if delayed:
            self._wait_again(delayed)
            self._admits = False

    def _wait_again(self, sequences: list[Sequence]) -> None:
        """Back to the head of the queue, in the same order."""
        for sequence in reversed(sequences):
            sequence.forget()
            if not sequence.is_ended:
                key = sequence.request.request_id
                self._waiting[key] = sequence
                self._waiting.move_to_end(key, last=False)

    def _retire(self, sequence: Sequence) -> None:
        self._release(sequence)
        self._has_ended = True

    def _release(self, sequence: Sequence) -> None:
        """Give the blocks back with the next update; full ones stay findable."""
        self._releases.append((sequence.id, sequence.take_commit(self._block_size)))
        if sequence.num_blocks_sent is not None:
            self._forgets.append(sequence.id)
        del self._running[sequence.id]
