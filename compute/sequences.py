"""What compute knows of the driver's sequences, and the check of a step against it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from compute.errors import InvalidStep
from compute.sampler import check_options
from compute.types import (
    BlockCopy,
    Chunk,
    PoolLayout,
    SamplingOptions,
    SequenceState,
    Step,
    TableExtension,
)

BlockTable = npt.NDArray[np.int32]
_INT32 = np.iinfo(np.int32)


class KnownSequence:
    """Tokens and block table of one sequence. Tables are replaced, never changed in place."""

    __slots__ = ("block_table", "sampling", "token_ids")

    def __init__(
        self, token_ids: list[int], block_table: BlockTable, sampling: SamplingOptions
    ) -> None:
        self.token_ids = token_ids
        self.block_table = block_table
        self.sampling = sampling


class StepPlan:
    """A step that was found sound, and the sequences as they will be after it.

    Building one changes nothing; `changed` and `closed` are for the owner of the known
    sequences to adopt when the step has run.
    """

    def __init__(
        self,
        step: Step,
        known: Mapping[str, KnownSequence],
        layout: PoolLayout,
        *,
        num_host_blocks: int = 0,
        vocab_size: int,
        max_sequence_length: int,
    ) -> None:
        """Check `step` whole.

        Raises:
            InvalidStep: it contradicts itself, `known`, the pool or the model.
        """
        self.closed = set(step.closed)
        self.changed: dict[str, KnownSequence] = {}
        self._known = known
        self._layout = layout
        self._num_host_blocks = num_host_blocks
        self._vocab_size = vocab_size
        self._max_length = max_sequence_length
        for state in step.sequences:
            self._add_state(state)
        for extension in step.extensions:
            self._extend(extension)
        self._check_copies(step.copies)
        self.sequences = self._check_chunks(step.chunks)

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
        if not token_ids:
            raise _invalid(sequence_id, "has no tokens")
        if len(token_ids) > self._max_length:
            raise _invalid(
                sequence_id, f"has {len(token_ids)} tokens, the model takes {self._max_length}"
            )
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            raise _invalid(sequence_id, f"has a token outside [0, {self._vocab_size})")
        check_options(sequence_id, state.sampling)
        table = self._table(sequence_id, state.block_ids)
        self.changed[sequence_id] = KnownSequence(token_ids, table, state.sampling)

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
        self.changed[sequence_id] = KnownSequence(sequence.token_ids, table, sequence.sampling)

    def _table(self, sequence_id: str, block_ids: Sequence[int]) -> BlockTable:
        self._check_blocks(f"sequence {sequence_id!r}", block_ids)
        return np.asarray(block_ids, dtype=np.int32)

    def _check_blocks(self, owner: str, block_ids: Iterable[int], num_others: int = 0) -> None:
        num_blocks = min(self._layout.num_blocks + num_others, _INT32.max)
        for block_id in block_ids:
            if not 0 <= block_id < num_blocks:
                raise InvalidStep(
                    f"{owner}: block {block_id} is outside [0, {num_blocks})", block_id=block_id
                )

    def _check_copies(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            self._check_blocks("copy", (copy.source, copy.target), self._num_host_blocks)

    def _check_chunks(self, chunks: Sequence[Chunk]) -> list[KnownSequence]:
        seen: set[str] = set()
        sequences = []
        for chunk in chunks:
            if chunk.sequence_id in seen:
                raise _invalid(chunk.sequence_id, "appears twice among the chunks")
            seen.add(chunk.sequence_id)
            sequence = self._find(chunk.sequence_id)
            self._check_chunk(chunk, sequence)
            sequences.append(sequence)
        return sequences

    def _check_chunk(self, chunk: Chunk, sequence: KnownSequence) -> None:
        num_known = len(sequence.token_ids)
        end = chunk.start + chunk.num_tokens
        covered = len(sequence.block_table) * self._layout.block_size
        problem = None
        if chunk.start < 0 or chunk.num_tokens < 1:
            problem = f"computes {chunk.num_tokens} tokens from {chunk.start}"
        elif end > num_known:
            problem = f"has {num_known} known tokens, the chunk ends at {end}"
        elif end > self._max_length:
            problem = f"computes {end} tokens, the model takes {self._max_length}"
        elif end > covered:
            problem = f"has room for {covered} tokens in its blocks, the chunk ends at {end}"
        elif chunk.sample and end != num_known:
            problem = f"samples after token {end} of {num_known}"
        if problem:
            raise _invalid(chunk.sequence_id, problem)


def _invalid(sequence_id: str, problem: str) -> InvalidStep:
    return InvalidStep(f"sequence {sequence_id!r} {problem}", sequence_id=sequence_id)
