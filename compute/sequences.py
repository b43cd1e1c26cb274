"""What compute knows of the driver's sequences, and the check of a step against it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from compute.errors import InvalidStep
from compute.sampling import SequenceSampler, check_options
from compute.types import (
    BlockCopy,
    Chunk,
    PoolLayout,
    SequenceState,
    Step,
    TableExtension,
)

BlockTable = npt.NDArray[np.int32]
_INT32 = np.iinfo(np.int32)
_MOST_GUESSES = 32  # of a chunk

NewSampler = Callable[[SequenceState], SequenceSampler]


class KnownSequence:
    """Tokens and block table of one sequence. Tables are replaced, never changed in place."""

    __slots__ = ("block_table", "num_prompt_tokens", "sampler", "token_ids")

    def __init__(
        self,
        token_ids: list[int],
        block_table: BlockTable,
        num_prompt_tokens: int,
        sampler: SequenceSampler,
    ) -> None:
        self.token_ids = token_ids
        self.block_table = block_table
        self.num_prompt_tokens = num_prompt_tokens
        self.sampler = sampler

    def with_table(self, block_table: BlockTable) -> KnownSequence:
        return KnownSequence(self.token_ids, block_table, self.num_prompt_tokens, self.sampler)


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """Tokens [start, end) of a sequence, to compute.

    `sent` are the tokens behind the known ones; the last `num_guesses` of them are guesses.
    """

    sequence_id: str
    sequence: KnownSequence
    start: int
    end: int
    sample: bool
    sent: Sequence[int] = ()
    num_guesses: int = 0

    @property
    def token_ids(self) -> list[int]:
        known = self.sequence.token_ids
        behind = len(known)
        sent = self.sent[max(self.start - behind, 0) : max(self.end - behind, 0)]
        return [*known[self.start : self.end], *sent]

    @property
    def given(self) -> Sequence[int]:
        """The sent tokens that are no guesses."""
        return self.sent[: len(self.sent) - self.num_guesses]

    @property
    def guesses(self) -> Sequence[int]:
        return self.sent[len(self.sent) - self.num_guesses :]

    @property
    def num_draws(self) -> int:
        """Most tokens that it gives, each from a row of its own, the last ones."""
        return self.num_guesses + 1 if self.sample else 0

    @property
    def num_scored(self) -> int:
        """First rows whose logits tell the log-probability of a prompt token."""
        if not self.sequence.sampler.options.return_prompt_logprobs:
            return 0
        return max(min(self.end, self.sequence.num_prompt_tokens - 1) - self.start, 0)

    def with_guesses(self, guesses: Sequence[int]) -> PlannedChunk:
        """The chunk and these tokens behind it."""
        return replace(self, end=self.end + len(guesses), sent=guesses, num_guesses=len(guesses))


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a step may ask for."""

    layout: PoolLayout
    num_host_blocks: int
    vocab_size: int
    max_sequence_length: int
    has_draft_model: bool


class StepPlan:
    """A step that was found sound, and the sequences as they will be after it.

    Building one changes nothing; `changed` and `closed` are for the owner of the known
    sequences to adopt when the step has run. In `chunks`, those of `wanted_guesses` lack
    the guesses that the draft model is to make: how many, by the chunk's number.
    """

    def __init__(
        self,
        step: Step,
        known: Mapping[str, KnownSequence],
        limits: StepLimits,
        new_sampler: NewSampler,
    ) -> None:
        """Check `step` whole.

        Raises:
            InvalidStep: it contradicts itself, `known`, the pool or the model.
        """
        self.closed = set(step.closed)
        self.changed: dict[str, KnownSequence] = {}
        self.chunks: list[PlannedChunk] = []
        self.wanted_guesses: dict[int, int] = {}
        self._known = known
        self._limits = limits
        self._new_sampler = new_sampler
        for state in step.sequences:
            self._add_state(state)
        for extension in step.extensions:
            self._extend(extension)
        self._check_copies(step.copies)
        self._add_chunks(step.chunks)

    def _find(self, sequence_id: str) -> KnownSequence:
        found = self.changed.get(sequence_id)
        if found is None and sequence_id not in self.closed:
            found = self._known.get(sequence_id)
        if found is None:
            raise _invalid(sequence_id, "is not known")
        return found

    def _add_state(self, state: SequenceState) -> None:
        sequence_id = state.sequence_id
        if sequence_id in self.changed:
            raise _invalid(sequence_id, "appears twice among the states")
        token_ids = list(state.token_ids)
        max_length = self._limits.max_sequence_length
        if not token_ids:
            raise _invalid(sequence_id, "has no tokens")
        if len(token_ids) > max_length:
            raise _invalid(
                sequence_id, f"has {len(token_ids)} tokens, the model takes {max_length}"
            )
        self._check_tokens(sequence_id, token_ids)
        if not 0 <= state.num_prompt_tokens <= len(token_ids):
            raise _invalid(
                sequence_id,
                f"has {len(token_ids)} tokens, {state.num_prompt_tokens} of them in the prompt",
            )
        check_options(sequence_id, state.sampling, self._limits.vocab_size)
        table = self._table(sequence_id, state.block_ids)
        self.changed[sequence_id] = KnownSequence(
            token_ids, table, state.num_prompt_tokens, self._new_sampler(state)
        )

    def _check_tokens(self, sequence_id: str, token_ids: Sequence[int]) -> None:
        vocab_size = self._limits.vocab_size
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:
            raise _invalid(sequence_id, f"has a token outside [0, {vocab_size})")

    def _extend(self, extension: TableExtension) -> None:
        sequence_id, first = extension.sequence_id, extension.first_index
        sequence = self._find(sequence_id)
        if not 0 <= first <= len(sequence.block_table):
            raise _invalid(
                sequence_id,
                f"has {len(sequence.block_table)} blocks, an extension starts at {first}",
            )
        new = self._table(sequence_id, extension.block_ids)
        kept_after = sequence.block_table[first + len(new) :]
        table = np.concatenate((sequence.block_table[:first], new, kept_after))
        self.changed[sequence_id] = sequence.with_table(table)

    def _table(self, sequence_id: str, block_ids: Sequence[int]) -> BlockTable:
        self._check_blocks(f"sequence {sequence_id!r}", block_ids)
        return np.asarray(block_ids, dtype=np.int32)

    def _check_blocks(self, owner: str, block_ids: Iterable[int], num_others: int = 0) -> None:
        num_blocks = min(self._limits.layout.num_blocks + num_others, _INT32.max)
        for block_id in block_ids:
            if not 0 <= block_id < num_blocks:
                raise InvalidStep(
                    f"{owner}: block {block_id} is outside [0, {num_blocks})", block_id=block_id
                )

    def _check_copies(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            self._check_blocks("copy", (copy.source, copy.target), self._limits.num_host_blocks)

    def _add_chunks(self, chunks: Sequence[Chunk]) -> None:
        seen: set[str] = set()
        for chunk in chunks:
            if chunk.sequence_id in seen:
                raise _invalid(chunk.sequence_id, "appears twice among the chunks")
            seen.add(chunk.sequence_id)
            sequence = self._find(chunk.sequence_id)
            problem = self._problem(chunk, sequence)
            if problem:
                raise _invalid(chunk.sequence_id, problem)
            self._add_chunk(chunk, sequence)

    def _add_chunk(self, chunk: Chunk, sequence: KnownSequence) -> None:
        end, num_guesses = chunk.start + chunk.num_tokens, chunk.num_drafts
        if num_guesses and not chunk.token_ids:
            self.wanted_guesses[len(self.chunks)] = num_guesses
            end, num_guesses = end - num_guesses, 0
        self.chunks.append(
            PlannedChunk(
                chunk.sequence_id,
                sequence,
                chunk.start,
                end,
                chunk.sample,
                chunk.token_ids,
                num_guesses,
            )
        )

    def _problem(self, chunk: Chunk, sequence: KnownSequence) -> str | None:
        if chunk.num_drafts and (problem := self._guess_problem(chunk, sequence)):
            return problem
        num_sent = len(chunk.token_ids)
        if num_sent:
            self._check_tokens(chunk.sequence_id, chunk.token_ids)
        num_known = len(sequence.token_ids) + (num_sent or chunk.num_drafts)
        end = chunk.start + chunk.num_tokens
        covered = len(sequence.block_table) * self._limits.layout.block_size
        max_length = self._limits.max_sequence_length
        if chunk.start < 0 or chunk.num_tokens < 1:
            return f"computes {chunk.num_tokens} tokens from {chunk.start}"
        if end > num_known:
            return f"has {num_known} known tokens, the chunk ends at {end}"
        if end > max_length:
            return f"computes {end} tokens, the model takes {max_length}"
        if end > covered:
            return f"has room for {covered} tokens in its blocks, the chunk ends at {end}"
        if chunk.sample and end != num_known:
            return f"samples after token {end} of {num_known}"
        return None

    def _guess_problem(self, chunk: Chunk, sequence: KnownSequence) -> str | None:
        count = chunk.num_drafts
        if not 0 < count <= _MOST_GUESSES or count >= chunk.num_tokens:
            return f"has {count} guesses in a chunk of {chunk.num_tokens} tokens"
        if not chunk.sample:
            return "has guesses and does not sample"
        if sequence.sampler.options.num_candidates:
            return "has guesses and wants candidates"
        if chunk.token_ids and count > len(chunk.token_ids):
            return f"has {count} guesses, {len(chunk.token_ids)} tokens were sent"
        if not chunk.token_ids and not self._limits.has_draft_model:
            return "wants guesses, and there is no draft model"
        return None


def _invalid(sequence_id: str, problem: str) -> InvalidStep:
    return InvalidStep(f"sequence {sequence_id!r} {problem}", sequence_id=sequence_id)
