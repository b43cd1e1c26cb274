"""Turns the chunks of a step into the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from compute.errors import InvalidStep
from compute.model import Batch, Places
from compute.sequences import PlannedChunk


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A batch, and where the output rows of each chunk are, by the chunk's number: those
    that score its prompt first, those that are drawn from last."""

    batch: Batch
    outputs: Sequence[range]


def pack(chunks: Sequence[PlannedChunk], block_size: int) -> PackedStep:
    """Lay out the rows: chunks of one token first, as decodes, then the longer ones.

    Raises:
        InvalidStep: two tokens would be written to the same slot.
    """
    decodes = [n for n, chunk in enumerate(chunks) if chunk.end - chunk.start == 1]
    prefills = [n for n, chunk in enumerate(chunks) if chunk.end - chunk.start > 1]
    rows = _Rows(block_size)
    outputs: list[range] = [range(0)] * len(chunks)
    for n in decodes:
        outputs[n] = rows.add_token(chunks[n])
    first_rows = [0]
    for n in prefills:
        outputs[n] = rows.add_chunk(chunks[n])
        first_rows.append(len(rows.token_ids) - len(decodes))
    slots = np.array(rows.slots, dtype=np.int64)
    if len(np.unique(slots)) != len(slots):
        raise InvalidStep("two tokens of the step share a slot")
    batch = Batch(
        token_ids=torch.tensor(rows.token_ids, dtype=torch.int64),
        positions=torch.tensor(rows.positions, dtype=torch.int64),
        slot_mapping=torch.from_numpy(slots),
        decodes=_places([chunks[n] for n in decodes]),
        chunks=_places([chunks[n] for n in prefills]),
        first_rows=torch.tensor(first_rows, dtype=torch.int32),
        output_rows=torch.tensor(rows.outputs, dtype=torch.int64),
    )
    return PackedStep(batch, outputs)


class _Rows:
    """Tokens, positions and slots of the rows so far, and which of them are wanted."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.token_ids: list[int] = []
        self.positions: list[int] = []
        self.slots: list[int] = []
        self.outputs: list[int] = []

    def add_token(self, chunk: PlannedChunk) -> range:
        """Returns the numbers of its outputs."""
        block, offset = divmod(chunk.start, self._block_size)
        outputs = self._want(chunk)
        self.token_ids += chunk.token_ids
        self.positions.append(chunk.start)
        self.slots.append(int(chunk.sequence.block_table[block]) * self._block_size + offset)
        return outputs

    def add_chunk(self, chunk: PlannedChunk) -> range:
        """Returns the numbers of its outputs."""
        positions = np.arange(chunk.start, chunk.end)
        table = chunk.sequence.block_table
        blocks = table[positions // self._block_size].astype(np.int64)
        outputs = self._want(chunk)
        self.token_ids += chunk.token_ids
        self.positions += range(chunk.start, chunk.end)
        self.slots += (blocks * self._block_size + positions % self._block_size).tolist()
        return outputs

    def _want(self, chunk: PlannedChunk) -> range:
        """Of the rows that come next: the scored ones and those to draw from, none twice."""
        first, num_rows = len(self.token_ids), chunk.end - chunk.start
        num_before = len(self.outputs)
        num_scored = chunk.num_scored
        self.outputs += range(first, first + num_scored)
        self.outputs += range(first + max(num_scored, num_rows - chunk.num_draws), first + num_rows)
        return range(num_before, len(self.outputs))


def _places(chunks: Sequence[PlannedChunk]) -> Places:
    """Tables as wide as the longest; the rest is block 0, never read."""
    sequences = [chunk.sequence for chunk in chunks]
    width = max((len(sequence.block_table) for sequence in sequences), default=0)
    tables = np.zeros((len(sequences), width), dtype=np.int32)
    for row, sequence in zip(tables, sequences, strict=True):
        row[: len(sequence.block_table)] = sequence.block_table
    lengths = torch.tensor([chunk.end for chunk in chunks], dtype=torch.int32)
    return Places(torch.from_numpy(tables), lengths)
