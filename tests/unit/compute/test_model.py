"""The decoder over pages computes what transformers computes over whole sequences."""

from __future__ import annotations

import random

import pytest
import torch

from compute.batching import pack
from compute.fakes import SimpleDriver
from compute.kernels.cpu import CpuKernels
from compute.kernels.reference import ReferenceKernels
from compute.sampling import SequenceSampler
from compute.sequences import KnownSequence, PlannedChunk
from compute.types import SamplingOptions

TOLERANCE = 1e-4  # fp32: sums over other orders than the oracle's

VARIANTS = {
    "grouped heads": {},
    "one head each": {"num_key_value_heads": 4},
    "one kv head": {"num_key_value_heads": 1},
    "tied head": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "heads wider than hidden": {"head_dim": 32},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


def _tokens(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(97), k=length)


def _poisoned_layers(runner, model):
    """The runner's layers, all NaN: whatever is read without having been written shows."""
    kv = runner._pool.tensor
    kv.fill_(float("nan"))
    return list(kv.unbind(1))


def _known(token_ids, block_table) -> KnownSequence:
    return KnownSequence(token_ids, block_table, len(token_ids), SequenceSampler(SamplingOptions()))


def _logits(model, layers, token_ids, block_table, block_size, sizes):
    """Logits [T, V] of the last position of each chunk, run one chunk per step."""
    known = _known(token_ids, block_table)
    rows = []
    start = 0
    for size in sizes:
        batch = pack([PlannedChunk("a", known, start, start + size, sample=True)], block_size).batch
        rows.append(model.decoder.logits(model.decoder.forward(batch, layers)))
        start += size
    return torch.cat(rows)


def _shuffled_table(num_blocks, num_needed, seed=1):
    import numpy as np

    ids = random.Random(seed).sample(range(num_blocks), num_needed)
    return np.array(ids, dtype=np.int32)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_position_has_the_oracles_logits(variant, make_model, make_pool):
    model = make_model(**VARIANTS[variant])
    layers = _poisoned_layers(model.runner(make_pool()), model)
    token_ids = _tokens(45)
    table = _shuffled_table(64, 3)
    got = _logits(model, layers, token_ids, table, 16, [1] * 45)
    torch.testing.assert_close(got, model.logits(token_ids), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("kernels", [ReferenceKernels, CpuKernels])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_chunks_that_cut_blocks_anywhere_give_the_oracles_logits(
    block_size, kernels, make_model, make_pool
):
    model = make_model(kernels=kernels())
    layers = _poisoned_layers(model.runner(make_pool(block_size=block_size)), model)
    token_ids = _tokens(100)
    sizes = [7, 1, 24, 32, 1, 1, 30, 4]
    ends = torch.tensor(sizes).cumsum(0) - 1
    table = _shuffled_table(64, -(-100 // block_size))
    got = _logits(model, layers, token_ids, table, block_size, sizes)
    expected = model.logits(token_ids)[ends]
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("kernels", [ReferenceKernels, CpuKernels])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_bf16_stays_as_near_to_fp32_as_the_oracle_in_bf16(
    block_size, kernels, make_model, make_pool
):
    model = make_model(torch.bfloat16, kernels())
    token_ids = _tokens(60)
    layers = _poisoned_layers(model.runner(make_pool(block_size=block_size)), model)
    table = _shuffled_table(64, -(-60 // block_size))
    got = _logits(model, layers, token_ids, table, block_size, [20, 20, *[1] * 20])
    ends = torch.tensor([19, 39, *range(40, 60)])
    oracle = model.logits(token_ids)[ends]
    exact = model.oracle.float()(torch.tensor([token_ids])).logits[0].float()[ends]
    # Both round activations to 8 significant bits, at slightly different places.
    assert (got - exact).abs().mean() < 1.5 * (oracle - exact).abs().mean()
    assert (got - exact).abs().mean() > 0  # it did run in bf16


def test_a_mixed_batch_gives_each_sequence_the_logits_it_has_alone(make_model, make_pool):
    model = make_model()
    layers = _poisoned_layers(model.runner(make_pool()), model)
    lengths = {"a": 20, "b": 33, "c": 50, "d": 1}
    tokens = {name: _tokens(length, seed) for seed, (name, length) in enumerate(lengths.items())}
    ids = _shuffled_table(64, 16)
    known = {name: _known(tokens[name], ids[4 * n : 4 * n + 4]) for n, name in enumerate(tokens)}

    def chunk(name, start, size, sample):
        return PlannedChunk(name, known[name], start, start + size, sample)

    warm = [chunk("a", 0, 19, False), chunk("b", 0, 32, False), chunk("c", 0, 10, False)]
    batch = pack(warm, 16).batch
    assert model.decoder.forward(batch, layers).shape == (0, 48)
    mixed = [
        chunk("c", 10, 40, True),
        chunk("a", 19, 1, True),
        chunk("d", 0, 1, False),
        chunk("b", 32, 1, True),
    ]
    packed = pack(mixed, 16)
    got = model.decoder.logits(model.decoder.forward(packed.batch, layers))
    assert len(got) == 3
    for each, rows in zip(mixed, packed.outputs, strict=True):
        if each.sample:
            [row] = rows
            expected = model.logits(tokens[each.sequence_id])[-1]
            torch.testing.assert_close(got[row], expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_only_the_slots_of_the_step_are_written(make_model, make_pool):
    model = make_model()
    runner = model.runner(make_pool())
    layers = _poisoned_layers(runner, model)
    _logits(model, layers, _tokens(20), _shuffled_table(64, 2), 16, [20])
    written = ~torch.isnan(runner._pool.tensor)
    # 20 tokens, 2 layers, keys and values, 2 heads of 16
    assert written.sum() == 20 * 2 * 2 * 2 * 16
    first, second = _shuffled_table(64, 2)
    assert written[int(first)].all()
    assert written[int(second), :, :, :4].all()


def test_sequences_that_share_prefix_blocks_get_their_own_answers(make_model, make_pool):
    model = make_model()
    runner = model.runner(make_pool(num_blocks=128, block_size=8))
    driver = SimpleDriver(runner, token_budget=30, share_prefixes=True)
    start = _tokens(40)
    prompts = {str(n): start + _tokens(5 + n, seed=n) for n in range(4)}
    cold = driver.generate({"0": prompts["0"]}, 12)
    assert driver.num_cached_tokens == 0
    warm = driver.generate(prompts, 12)
    assert driver.num_cached_tokens == 4 * 40
    for name, prompt in prompts.items():
        token_ids = list(prompt)
        for _ in range(12):
            token_ids.append(int(model.logits(token_ids)[-1].argmax()))
        assert warm[name].token_ids == token_ids[len(prompt) :]
    assert warm["0"] == cold["0"]
