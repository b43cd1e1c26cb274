"""The next step: which sequences, and how many tokens of each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Items

from gateway.errors import WorkerUnavailable
from gateway.group import SequenceGroup
from gateway.pace import Pace
from gateway.ports import BlockCopy, SampledToken, Step, StepResult
from gateway.sequence import Sequence
from gateway.shared_blocks import SharedBlocks
from gateway.speculation import Speculator

# Tokens that a step must have for its time to say what prefills cost.
_LEAST_PREFILL = 64


class StepBuilder:
    """Fills one step at a time and takes its result apart."""

    def __init__(self, token_budget: int, pace: Pace, speculator: Speculator) -> None:
        self.shared = SharedBlocks()
        self._budget = token_budget
        self._pace = pace
        self._speculator = speculator
        self._ids = itertools.count(1)
        self._batch: list[Sequence] = []
        self._num_decodes = self._num_guessing = self._num_prompt_tokens = 0

    def fill(self, groups: Items[SequenceGroup]) -> bool:
        """Give chunks to the sequences of `groups`, in order; whether any got one.

        Decodes first, one token each, with guesses in what the budget has left when each
        has its token; then the tokens of prompts, as many as the pace allows.
        """
        self.shared.start_step()
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for group in groups:
            if group.beams is not None and not group.can_step:
                continue
            may_decode = group.beams is None or group.is_level
            for sequence in group.sequences:
                num_pending = sequence.num_pending
                if sequence.num_slots <= sequence.num_computed or not num_pending:
                    continue  # no slot, or nothing to compute
                if sequence.is_ended:
                    continue
                if num_pending > 1:
                    prefills.append(sequence)
                elif may_decode:
                    decodes.append(sequence)
        budget = self._budget - len(decodes)
        self._num_guessing = 0
        for sequence in decodes:
            room = min(sequence.num_slots, sequence.group.max_length - 1)
            room = min(budget, room - len(sequence.token_ids))
            drafts, count = self._speculator.guess(sequence, room) if room > 0 else ((), 0)
            sequence.chunk = sequence.next_chunk(1, drafts, count)
            budget -= count
            self._num_guessing += count > 0
        budget = self._pace.allowance(len(decodes), budget)
        before = budget
        batch = decodes
        for sequence in prefills:
            if budget < 1:
                break
            limit = _most_tokens(sequence, budget)
            if limit < 1 or not self.shared.claim(sequence):
                continue
            sequence.chunk = sequence.next_chunk(limit)
            budget -= sequence.chunk.num_tokens
            batch.append(sequence)
        self._batch = batch
        self._num_prompt_tokens = before - budget
        self._num_decodes = len(batch) - sum(1 for s in prefills if s.chunk is not None)
        return bool(batch)

    def step(self, closed: tuple[str, ...], copies: list[BlockCopy]) -> Step:
        """The step as it was filled."""
        batch = self._batch
        return Step(
            next(self._ids),
            closed,
            [state for s in batch if (state := s.take_state())],
            [extension for s in batch if (extension := s.take_extension())],
            copies,
            [s.chunk for s in batch if s.chunk is not None],
        )

    def finish(self, result: StepResult) -> list[tuple[Sequence, list[SampledToken]]]:
        """The sequences of the step with the tokens they got; their chunks are done.

        Raises WorkerUnavailable if these are not those that were asked for.
        """
        drawn: dict[str, list[SampledToken]] = {}
        for token in result.tokens:
            drawn.setdefault(token.sequence_id, []).append(token)
        answered = drawn.keys() | {one.sequence_id for one in result.candidates}
        failed = {failure.sequence_id for failure in result.failures}
        asked = {s.id for s in self._batch if s.chunk is not None and s.chunk.sample}
        if answered != asked - failed or not failed <= {s.id for s in self._batch}:
            raise WorkerUnavailable("compute answered with tokens of other sequences")
        self._observe(result)
        stepped = []
        for sequence in self._batch:
            chunk = sequence.chunk
            assert chunk is not None
            tokens = drawn.get(sequence.id, [])
            num_accepted = max(0, len(tokens) - 1)
            if num_accepted > chunk.num_drafts:
                raise WorkerUnavailable("compute answered with more tokens than were asked for")
            sequence.num_computed += chunk.num_tokens - chunk.num_drafts + num_accepted
            sequence.chunk = None
            if chunk.num_drafts:
                self._speculator.learn(sequence, chunk.num_drafts, len(tokens))
            stepped.append((sequence, tokens))
        self._batch = []
        self.shared.end_step()
        return stepped

    def _observe(self, result: StepResult) -> None:
        seconds = result.elapsed - result.copy_elapsed
        self._pace.observe(self._num_decodes, self._num_prompt_tokens, seconds)
        self._speculator.observe(
            self._num_decodes, self._num_guessing, self._num_prompt_tokens, seconds
        )

    def prefill_measured(self, result: StepResult) -> tuple[int, float]:
        """Tokens and seconds of a step that was hardly anything but prefill, else zeros."""
        num_tokens = self._num_prompt_tokens
        if num_tokens >= max(_LEAST_PREFILL, 4 * self._num_decodes):
            return num_tokens, result.elapsed - result.copy_elapsed
        return 0, 0.0


def _most_tokens(sequence: Sequence, budget: int) -> int:
    """Beams draw their next tokens together, so each waits with its last one."""
    if sequence.group.beams is None or len(sequence.group.sequences) == 1:
        return budget
    return min(budget, sequence.num_pending - 1)
