"""Turns the chunks of a step into the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from compute.errors import InvalidStep
from compute.model import Batch, PrefillChunk
from compute.sequences import KnownSequence
from compute.types import Chunk


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A batch, and for each of its sampled rows the number of its chunk in the step."""

    batch: Batch
    sampled_chunks: list[int]


def pack(
    chunks: Sequence[Chunk], sequences: Sequence[KnownSequence], block_size: int
) -> PackedStep:
    """Lay out the rows: chunks of one token first, as decodes, then the longer ones.

    Raises:
        InvalidStep: two tokens would be written to the same slot.
    """
    decodes = [n for n, chunk in enumerate(chunks) if chunk.num_tokens == 1]
    prefills = [n for n, chunk in enumerate(chunks) if chunk.num_tokens > 1]
    rows = _Rows(block_size)
    for n in decodes:
        rows.add_token(chunks[n], sequences[n])
    prefill_chunks = [rows.add_chunk(chunks[n], sequences[n]) for n in prefills]
    slots = np.array(rows.slots, dtype=np.int64)
    if len(np.unique(slots)) != len(slots):
        raise InvalidStep("two tokens of the step share a slot")
    sampled = [n for n in decodes + prefills if chunks[n].sample]
    batch = Batch(
        token_ids=torch.tensor(rows.token_ids, dtype=torch.int64),
        positions=torch.tensor(rows.positions, dtype=torch.int64),
        slot_mapping=torch.from_numpy(slots),
        block_tables=_stacked([sequences[n] for n in decodes]),
        seq_lens=torch.tensor([chunks[n].start + 1 for n in decodes], dtype=torch.int32),
        chunks=prefill_chunks,
        sample_rows=torch.tensor(_last_rows(chunks, decodes + prefills), dtype=torch.int64),
    )
    return PackedStep(batch, sampled)


class _Rows:
    """Tokens, positions and slots of the rows so far."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.token_ids: list[int] = []
        self.positions: list[int] = []
        self.slots: list[int] = []

    def add_token(self, chunk: Chunk, sequence: KnownSequence) -> None:
        block, offset = divmod(chunk.start, self._block_size)
        self.token_ids.append(sequence.token_ids[chunk.start])
        self.positions.append(chunk.start)
        self.slots.append(int(sequence.block_table[block]) * self._block_size + offset)

    def add_chunk(self, chunk: Chunk, sequence: KnownSequence) -> PrefillChunk:
        end = chunk.start + chunk.num_tokens
        first_row = len(self.token_ids)
        positions = np.arange(chunk.start, end)
        blocks = sequence.block_table[positions // self._block_size].astype(np.int64)
        self.token_ids += sequence.token_ids[chunk.start : end]
        self.positions += range(chunk.start, end)
        self.slots += (blocks * self._block_size + positions % self._block_size).tolist()
        table = torch.from_numpy(sequence.block_table)
        return PrefillChunk(first_row, first_row + chunk.num_tokens, table, end)


def _stacked(sequences: Sequence[KnownSequence]) -> torch.Tensor:
    """Block tables [N, M] int32, as wide as the longest; the rest is block 0, never read."""
    width = max((len(sequence.block_table) for sequence in sequences), default=0)
    tables = np.zeros((len(sequences), width), dtype=np.int32)
    for row, sequence in zip(tables, sequences, strict=True):
        row[: len(sequence.block_table)] = sequence.block_table
    return torch.from_numpy(tables)


def _last_rows(chunks: Sequence[Chunk], order: Sequence[int]) -> list[int]:
    """The last row of each chunk that samples, in the order of the rows."""
    last_rows = []
    row = -1
    for n in order:
        row += chunks[n].num_tokens
        if chunks[n].sample:
            last_rows.append(row)
    return last_rows
