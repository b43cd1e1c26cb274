"""Recorded decode steps do what the decoder does, and write nothing for the rows that fill up."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from compute.batching import pack
from compute.captured import CapturedDecodes, sizes_up_to
from compute.kernels.cpu import CpuKernels
from compute.sampling import SequenceSampler
from compute.sequences import KnownSequence, PlannedChunk
from compute.types import SamplingOptions
from tests.unit.compute import families

BLOCK_SIZE = 16
MOST_TOKENS = 128


class AgainRecorder:
    """Replays by launching again what reads the same addresses: the result is one tensor."""

    def __init__(self):
        self.num_recorded = 0

    def record(self, launch):
        self.num_recorded += 1
        result = launch().clone()

        def replay():
            result.copy_(launch())
            return result

        return replay


class Setting:
    """A decoder, sequences with prompts in a pool that is else NaN, and a recorder."""

    def __init__(self, variant, directory, num_sequences):
        self.decoder = families.make(variant, CpuKernels(), directory).decoder
        config, blocks = self.decoder.config, MOST_TOKENS // BLOCK_SIZE
        shape = (num_sequences * blocks, 2, BLOCK_SIZE, config.num_kv_heads, config.head_size)
        self.layers = [torch.full(shape, math.nan) for _ in range(config.num_layers)]
        rng = random.Random(2)
        ids = rng.sample(range(shape[0]), shape[0])
        self.known = []
        for n in range(num_sequences):
            tokens = rng.choices(range(97), k=MOST_TOKENS)
            table = np.array(ids[n * blocks : (n + 1) * blocks], np.int32)
            sampler = SequenceSampler(SamplingOptions())
            self.known.append(KnownSequence(tokens, table, len(tokens), sampler))
        self.recorder = AgainRecorder()
        self.captured = CapturedDecodes(
            self.decoder, self.recorder, self.layers, None, most_rows=8, num_positions=MOST_TOKENS
        )
        self.prefill([(n, 0, 20 + n) for n in range(num_sequences)])

    def batch(self, spans, sample=True):
        chunks = [PlannedChunk(str(n), self.known[n], a, b, sample) for n, a, b in spans]
        return pack(chunks, BLOCK_SIZE).batch

    def prefill(self, spans):
        self.decoder.forward(self.batch(spans, sample=False), self.layers)


@pytest.mark.parametrize("variant", ["llama", "gpt2", "gemma3"])
def test_replayed_steps_equal_those_that_are_launched(variant, tmp_path):
    setting = Setting(variant, tmp_path, 7)
    for batch_of in ([0, 1, 2, 3, 4, 5, 6], [3], [5, 1, 2], [6, 0, 1, 2, 3], [4, 2]):
        spans = [(n, 20 + n, 21 + n) for n in batch_of]
        batch = setting.batch(spans)
        assert setting.captured.fits(batch)
        before = [layer.clone() for layer in setting.layers]
        got = setting.captured.forward(batch)
        after = [layer.clone() for layer in setting.layers]
        for layer, old in zip(setting.layers, before, strict=True):
            layer.copy_(old)
        expected = setting.decoder.forward(batch, setting.layers)
        assert torch.equal(got, expected)
        for layer, ours in zip(setting.layers, after, strict=True):
            assert torch.equal(layer.nan_to_num(7.0), ours.nan_to_num(7.0))
    assert setting.recorder.num_recorded == 4  # sizes 1, 2, 4 and 8


def test_recording_writes_nothing(tmp_path):
    setting = Setting("llama", tmp_path, 2)
    before = [layer.clone() for layer in setting.layers]
    told = []
    setting.captured.record_all(lambda *state: told.append(state))
    for layer, old in zip(setting.layers, before, strict=True):
        assert torch.equal(layer.nan_to_num(7.0), old.nan_to_num(7.0))
    assert setting.recorder.num_recorded == len(setting.captured.sizes)
    assert told[-1] == (4, 4)


def test_results_outlast_the_next_step_and_are_of_the_rows_wanted(tmp_path):
    setting = Setting("llama", tmp_path, 3)
    first = setting.captured.forward(setting.batch([(0, 20, 21), (1, 21, 22)]))
    kept = first.clone()
    chunks = [
        PlannedChunk("1", setting.known[1], 22, 23, False),
        PlannedChunk("0", setting.known[0], 21, 22, True),
    ]
    batch = pack(chunks, BLOCK_SIZE).batch
    got = setting.captured.forward(batch)
    assert torch.equal(first, kept)
    assert got.shape[0] == 1
    assert torch.equal(got, setting.decoder.forward(batch, setting.layers))


def test_steps_with_chunks_and_larger_ones_do_not_fit(tmp_path):
    setting = Setting("llama", tmp_path, 9)
    assert not setting.captured.fits(setting.batch([(0, 20, 22)]))
    assert not setting.captured.fits(setting.batch([(n, 20 + n, 21 + n) for n in range(9)]))
    assert not setting.captured.fits(setting.batch([]))


@pytest.mark.parametrize(
    ("most_rows", "last"), [(1, 1), (3, 4), (8, 8), (9, 16), (33, 64), (64, 64), (256, 256)]
)
def test_sizes_reach_the_largest_batch(most_rows, last):
    sizes = sizes_up_to(most_rows)
    assert sizes[-1] == last
    assert sizes == sorted(set(sizes))
    assert len(sizes) < 16
