"""The same tokens have the same bits on the CPU, however they came to be computed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from compute import threads
from compute.batching import pack
from compute.kernels.cpu import CpuKernels
from compute.sampling import SequenceSampler
from compute.sequences import KnownSequence, PlannedChunk
from compute.types import SamplingOptions

LENGTH = 250  # three times over the edge of a piece of the kernels
PROMPT = random.Random(0).choices(range(97), k=LENGTH)
OTHER = random.Random(1).choices(range(97), k=LENGTH)

WAYS = {
    "one at a time": [1] * LENGTH,
    "small chunks": [7] * 35 + [5],
    "chunks, then one at a time": [130] + [1] * 120,
    "one at a time, then guesses": [100] + [1] * 50 + [5] * 20,
}


def _known(token_ids, blocks) -> KnownSequence:
    scored = SamplingOptions(return_prompt_logprobs=True)
    table = np.array(blocks, dtype=np.int32)
    return KnownSequence(token_ids, table, len(token_ids), SequenceSampler(scored))


def _logits(model, sizes, *, beside=0, seed=0):
    """Logits [T, V] of a sequence in chunks of `sizes`, another beside it or not."""
    config = model.config
    shape = (64, config.num_layers, 2, 8, config.num_kv_heads, config.head_size)
    layers = list(torch.full(shape, torch.nan, dtype=model.decoder.dtype).unbind(1))
    blocks = random.Random(seed).sample(range(64), 64)
    known, other = _known(PROMPT, blocks[:32]), _known(OTHER, blocks[32:])
    rows, start, other_start = [], 0, 0
    for size in sizes:
        chunks = [PlannedChunk("a", known, start, start + size, sample=True)]
        if beside and other_start + beside <= LENGTH:
            end = other_start + beside
            chunks.insert(0, PlannedChunk("b", other, other_start, end, sample=True))
            other_start = end
        packed = pack(chunks, 8)
        outputs = model.decoder.forward(packed.batch, layers)
        rows.append(model.decoder.logits(outputs)[list(packed.outputs[-1])])
        start += size
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_have_the_same_bits_alone_batched_chunked_decoded_and_verified(make_model, dtype):
    model = make_model(dtype, CpuKernels())
    whole = _logits(model, [LENGTH])
    for name, sizes in WAYS.items():
        for beside in (0, 1, 60):
            got = _logits(model, sizes, beside=beside, seed=beside)
            assert torch.equal(got, whole), (name, beside)


def test_logits_have_the_same_bits_with_any_number_of_threads(make_model):
    before = torch.get_num_threads()
    found = []
    for count in (1, 2, 3):
        threads.configure(count)
        model = make_model(torch.bfloat16, CpuKernels())
        found.append(_logits(model, WAYS["chunks, then one at a time"], beside=60))
    threads.configure(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
