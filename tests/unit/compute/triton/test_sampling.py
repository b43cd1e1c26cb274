"""Drawn tokens against the CPU's way of drawing."""

from __future__ import annotations

import math

import pytest
import torch

from compute.kernels.triton.sampling import TILE, draw, likeliest
from compute.sampling.drawing import draw as draw_on_cpu
from compute.sampling.drawing import uniform
from compute.types import SamplingOptions
from tests.unit.compute.triton.support import assert_same_bits, randn

SIZES = [1, 97, TILE, 2 * TILE + 300]


@pytest.mark.parametrize("size", SIZES)
def test_the_likeliest_is_the_lowest_id_among_equals(device, size):
    logits = randn(4, size + 5)[:, :size].clone()
    logits[1] = 3.0
    logits[2, size // 2 :] = 9.0
    logits[3, : size - 1] = -math.inf
    there = logits.to(device)
    drawn = likeliest(there)
    assert drawn.token_ids.tolist() == [int(logits[0].argmax()), 0, size // 2, size - 1]
    totals = torch.logsumexp(logits.double(), dim=1)
    expected = logits.double()[range(4), drawn.token_ids.cpu()] - totals
    for actual, exact in ((drawn.logsumexps, totals), (drawn.logprobs, expected)):
        # A sum of thousands in fp32, and its logarithm
        torch.testing.assert_close(actual.cpu().double(), exact, rtol=1e-5, atol=1e-5)
    assert_same_bits(there, logits)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_are_those_of_the_cpu(device, size, temperature, dtype):
    num_rows = 12
    logits = 3 * randn(num_rows, size)
    logits[:, size // 3 : size // 2] = -math.inf
    options = [
        SamplingOptions(temperature=temperature, seed=11, sequence_index=k) for k in range(num_rows)
    ]
    uniforms = torch.tensor([uniform(one, 5) for one in options], dtype=torch.float64)
    temperatures = torch.full((num_rows,), temperature)
    drawn = draw(logits.to(device), temperatures.to(device), uniforms.to(dtype).to(device))
    if temperature == 0:
        assert drawn.token_ids.tolist() == logits.argmax(dim=1).tolist()
    else:
        expected = [
            draw_on_cpu(row, float(row.max()), one, 5)
            for row, one in zip(logits, options, strict=True)
        ]
        assert drawn.token_ids.tolist() == expected
    exact = torch.log_softmax(logits.double(), dim=1)[range(num_rows), drawn.token_ids.cpu()]
    torch.testing.assert_close(drawn.logprobs.cpu().double(), exact, rtol=1e-5, atol=1e-5)


def test_shares_at_the_ends_draw_possible_tokens(device):
    logits = torch.full((3, TILE + 50), -math.inf)
    logits[:, 7], logits[:, TILE + 20] = 0.0, 0.0
    below_one = 1 - 2.0**-53
    uniforms = torch.tensor([0.0, 0.5, below_one], dtype=torch.float64, device=device)
    drawn = draw(logits.to(device), torch.ones(3, device=device), uniforms)
    assert drawn.token_ids.tolist() == [7, TILE + 20, TILE + 20]


def test_a_row_is_drawn_alone_as_in_company(device):
    logits = randn(5, 700).to(device)
    temperatures = torch.tensor([0.5, 1.0, 0.0, 2.0, 1.0], device=device)
    uniforms = torch.rand(5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    uniforms = uniforms.to(device)
    together = draw(logits, temperatures, uniforms)
    for k in range(5):
        row = slice(k, k + 1)
        for part, whole in zip(
            draw(logits[row], temperatures[row], uniforms[row]), together, strict=True
        ):
            assert_same_bits(part, whole[row])


def test_tensors_that_do_not_fit_are_refused(device):
    logits, ones = randn(2, 8).to(device), torch.ones(2, device=device)
    with pytest.raises(ValueError, match="logits"):
        likeliest(logits.half())
    with pytest.raises(ValueError, match="at least one score"):
        likeliest(logits[:, :0])
    with pytest.raises(ValueError, match="temperatures"):
        draw(logits, ones[:1], ones)
    with pytest.raises(ValueError, match="uniforms"):
        draw(logits, ones, ones.half())
