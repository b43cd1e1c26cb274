"""Decode steps that are recorded once for each of some batch sizes, and replayed.

Launching the kernels of a small step one by one takes longer than the device needs to run
them. A recording replays them all at once, with the addresses it was made with: inputs are
copied to where it reads them, and a batch is filled up to the next size with rows that are
written nowhere.

Source: NVIDIA, CUDA C++ Programming Guide, "CUDA Graphs".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from compute.model import Batch, Decoder, Places

_LARGE_STEP = 32  # between sizes above it


class Recorder(Protocol):
    """A device's way to record what is launched."""

    def record(self, launch: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Run `launch`, and return what does all of it again and gives its result.

        Every replay gives the same tensor, overwritten.
        """


class CudaRecorder:
    """CUDA graphs, which share the memory of what is between their inputs and results."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def record(self, launch: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        # What is done once only, such as compiling and tuning, must not be recorded.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            launch()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            result = launch()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


class CapturedDecodes:
    """The steps of one decoder over one pool. A size is recorded when it first comes.

    Recordings hold addresses of the pool: make a new object for another pool.
    """

    def __init__(
        self,
        decoder: Decoder,
        recorder: Recorder,
        kv_layers: Sequence[torch.Tensor],
        kv_scales: Sequence[torch.Tensor] | None,
        *,
        most_rows: int,
        num_positions: int,
    ) -> None:
        """Batches of up to `most_rows`, of sequences of up to `num_positions` tokens."""
        decoder.reserve_positions(num_positions)
        self._decoder, self._recorder = decoder, recorder
        self._kv_layers, self._kv_scales = kv_layers, kv_scales
        self.sizes = sizes_up_to(most_rows)
        width = math.ceil(num_positions / kv_layers[0].shape[2])
        self._inputs = _Inputs(self.sizes[-1], width, num_positions, decoder.device)
        self._replays: dict[int, Callable[[], torch.Tensor]] = {}

    def fits(self, batch: Batch) -> bool:
        """Whether the batch is of decodes alone, few enough."""
        return not len(batch.chunks.seq_lens) and 0 < len(batch.token_ids) <= self.sizes[-1]

    def forward(self, batch: Batch) -> torch.Tensor:
        """What Decoder.forward returns for a batch that fits, which may be on the CPU."""
        num_rows = len(batch.token_ids)
        size = next(size for size in self.sizes if size >= num_rows)
        if size not in self._replays:
            self._replays[size] = self._record(size)
        self._inputs.fill(batch, size)
        outputs = self._replays[size]()
        if len(batch.output_rows) == num_rows:
            # The next replay overwrites them.
            return outputs[:num_rows].clone()
        return outputs[batch.output_rows.to(outputs.device)]

    def record_all(self, progress: Callable[[int, int], None]) -> None:
        """Record every size now, the largest first, whose memory the others share."""
        for done, size in enumerate(reversed(self.sizes)):
            progress(done, len(self.sizes))
            if size not in self._replays:
                self._replays[size] = self._record(size)
        progress(len(self.sizes), len(self.sizes))

    def _record(self, size: int) -> Callable[[], torch.Tensor]:
        self._inputs.clear()
        batch, scratch = self._inputs.first(size), self._decoder.new_scratch(size)

        def launch() -> torch.Tensor:
            return self._decoder.forward(batch, self._kv_layers, self._kv_scales, scratch)

        return self._recorder.record(launch)


class _Inputs:
    """Where recordings read their batches: of most rows, a smaller one uses the first."""

    def __init__(self, most_rows: int, width: int, num_positions: int, device: torch.device):
        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._num_positions = num_positions
        self._token_ids = zeros(most_rows, dtype=torch.int64)
        self._positions = zeros(most_rows, dtype=torch.int64)
        self._slots = zeros(most_rows, dtype=torch.int64)
        self._tables = zeros(most_rows, width, dtype=torch.int32)
        self._lengths = zeros(most_rows, dtype=torch.int32)
        self._rows = torch.arange(most_rows, device=device)
        self._no_chunks = Places(zeros(0, 0, dtype=torch.int32), zeros(0, dtype=torch.int32))
        self._first_rows = zeros(1, dtype=torch.int32)
        self.clear()

    def clear(self) -> None:
        """Nothing but rows that fill up: the first token of block 0 is read, none is written."""
        self._token_ids.zero_()
        self._positions.zero_()
        self._slots.fill_(-1)
        self._tables.zero_()
        self._lengths.fill_(1)

    def fill(self, batch: Batch, size: int) -> None:
        n, width = len(batch.token_ids), batch.decodes.block_tables.shape[1]
        self._token_ids[:n].copy_(batch.token_ids, non_blocking=True)
        self._positions[:n].copy_(batch.positions, non_blocking=True)
        self._slots[:n].copy_(batch.slot_mapping, non_blocking=True)
        self._tables[:n, :width].copy_(batch.decodes.block_tables, non_blocking=True)
        self._lengths[:n].copy_(batch.decodes.seq_lens, non_blocking=True)
        # What a larger batch has left behind.
        self._slots[n:size].fill_(-1)
        self._lengths[n:size].fill_(1)
        self._positions[n:size].zero_()

    def first(self, size: int) -> Batch:
        return Batch(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            slot_mapping=self._slots[:size],
            decodes=Places(self._tables[:size], self._lengths[:size]),
            chunks=self._no_chunks,
            first_rows=self._first_rows,
            output_rows=self._rows[:size],
            num_positions=self._num_positions,
        )


def sizes_up_to(most_rows: int) -> list[int]:
    """1, 2, 4, 8, then multiples of 8 up to 32, then of 32; the last one is at least most_rows."""
    sizes = [1, 2, 4, *range(8, _LARGE_STEP, 8)]
    sizes += range(_LARGE_STEP, most_rows + _LARGE_STEP, _LARGE_STEP)
    last = next(n for n, size in enumerate(sizes) if size >= most_rows)
    return sizes[: last + 1]
