"""Norms, activations and int8 products against the oracle."""

from __future__ import annotations

import math

import pytest
import torch

from compute.kernels.triton.activations import KINDS, activate, activate_mul
from compute.kernels.triton.int8_linear import int8_linear
from compute.kernels.triton.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from compute.linear import quantized
from tests.unit.compute.triton.support import (
    CANARY,
    ORACLE,
    assert_guards_stand,
    assert_same_bits,
    guarded,
    randn,
    tolerance,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 64), (5, 576), (2, 4096)])
def test_norms_equal_the_oracle(device, dtype, num_rows, size):
    x = (2 + randn(num_rows, size + 16, dtype=dtype))[:, :size]  # rows that lie apart
    weight, bias = randn(size, dtype=dtype, seed=1), randn(size, dtype=dtype, seed=2)
    there = x.clone().to(device)
    w, b = weight.to(device), bias.to(device)
    for run, expect, more in [
        (rms_norm, ORACLE.rms_norm, False),
        (layer_norm, ORACLE.layer_norm, True),
    ]:
        whole, out = guarded((num_rows, size), dtype, device)
        expected = torch.empty(num_rows, size, dtype=dtype)
        run(there, w, *([b] if more else []), 1e-5, out)
        expect(x, weight, *([bias] if more else []), 1e-5, expected)
        torch.testing.assert_close(out.cpu(), expected, **tolerance(dtype))
        assert_guards_stand(whole)
    assert_same_bits(there, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_before_norms_are_stored_and_normed(device, dtype):
    x, residual = randn(3, 576, dtype=dtype), randn(3, 576, dtype=dtype, seed=1)
    weight, bias = randn(576, dtype=dtype, seed=2), randn(576, dtype=dtype, seed=3)
    for run, expect, more in [
        (add_rms_norm, ORACLE.add_rms_norm, False),
        (add_layer_norm, ORACLE.add_layer_norm, True),
    ]:
        whole, sums = guarded((3, 576), dtype, device)
        sums.copy_(residual)
        out, there = torch.empty(3, 576, dtype=dtype, device=device), x.clone().to(device)
        expected, expected_sums = torch.empty(3, 576, dtype=dtype), residual.clone()
        biases = [bias.to(device)] if more else []
        run(there, sums, weight.to(device), *biases, 1e-5, out)
        expect(x, expected_sums, weight, *([bias] if more else []), 1e-5, expected)
        torch.testing.assert_close(out.cpu(), expected, **tolerance(dtype))
        torch.testing.assert_close(sums.cpu(), expected_sums, **tolerance(dtype))
        assert_guards_stand(whole)
        assert_same_bits(there, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 24), (3, 1536)])
def test_activations_equal_the_oracle(device, dtype, kind, num_rows, size):
    gate_up = 4 * randn(num_rows, 2 * size, dtype=dtype)
    there = gate_up.clone().to(device)
    whole, out = guarded((num_rows, size), dtype, device)
    expected = torch.empty(num_rows, size, dtype=dtype)
    activate_mul(kind, there, out)
    ORACLE.activate_mul(kind, gate_up, expected)
    torch.testing.assert_close(out.cpu(), expected, **tolerance(dtype))
    assert_guards_stand(whole)
    assert_same_bits(there, gate_up)

    gate = there[:, :size]  # rows that lie apart; and in place
    activate(kind, gate, gate)
    ORACLE.activate(kind, gate_up[:, :size], expected)
    torch.testing.assert_close(gate.cpu(), expected, **tolerance(dtype))
    assert_same_bits(there[:, size:], gate_up[:, size:])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities
@pytest.mark.parametrize("kind", KINDS)
def test_activations_are_finite_at_the_ends_and_pass_nan_on(device, kind):
    x = torch.tensor([[-1e10, -100.0, -0.0, 0.0, 100.0, 1e10, math.nan]], device=device)
    out = torch.empty_like(x)
    activate(kind, x, out)
    expected = torch.tensor([0.0, 0.0, 0.0, 0.0, 100.0, 1e10])
    torch.testing.assert_close(out[0, :6].cpu(), expected)
    assert out[0, 6].isnan()


@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs", "dtype", "out_dtype", "has_bias"),
    [
        (1, 40, 256, torch.float16, torch.float16, False),
        (5, 33, 300, torch.float32, torch.float32, True),
        (17, 70, 96, torch.bfloat16, torch.bfloat16, True),
        (70, 130, 200, torch.float16, torch.float32, False),
    ],
)
def test_int8_products_equal_the_dequantized_ones(
    device, num_rows, num_outputs, num_inputs, dtype, out_dtype, has_bias
):
    weight, scales = quantized(randn(num_outputs, num_inputs, seed=1))
    x = randn(num_rows, num_inputs + 16, dtype=dtype)[:, :num_inputs]
    bias = randn(num_outputs, dtype=dtype, seed=2) if has_bias else None
    expected = x.double() @ (weight.double() * scales.double()[:, None]).T
    expected = (expected if bias is None else expected + bias.double()).to(out_dtype)
    whole, out = guarded((num_rows, num_outputs), out_dtype, device)
    int8_linear(
        x.to(device),
        weight.to(device),
        scales.to(device),
        None if bias is None else bias.to(device),
        out,
    )
    # Sums of some hundred products of about 1, in another order, rounded once.
    torch.testing.assert_close(out.cpu(), expected, rtol=tolerance(out_dtype)["rtol"], atol=1e-4)
    assert_guards_stand(whole)


def test_row_kernels_refuse_tensors_that_do_not_fit(device):
    x, out = randn(2, 16).to(device), torch.full((2, 16), CANARY, device=device)
    ones = torch.ones(16, device=device)
    for bad in (x[:1], x[:, :8], x.double(), randn(16, 2).to(device).t()):
        with pytest.raises(ValueError, match="x "):
            rms_norm(bad, ones, 1e-5, out)
        with pytest.raises(ValueError, match="x "):
            activate("silu", bad, out)
    with pytest.raises(ValueError, match="weight"):
        rms_norm(x, ones[:8], 1e-5, out)
    with pytest.raises(ValueError, match="bias"):
        layer_norm(x, ones, ones.half(), 1e-5, out)
    with pytest.raises(ValueError, match="residual"):
        add_rms_norm(x, x.half(), ones, 1e-5, out)
    with pytest.raises(ValueError, match="gate_up"):
        activate_mul("silu", x, out)
    with pytest.raises(ValueError, match="activation"):
        activate("swish", x, out)
    weight = torch.zeros(16, 16, dtype=torch.int8, device=device)
    with pytest.raises(ValueError, match="weight"):
        int8_linear(x, weight.float(), ones, None, out)
    with pytest.raises(ValueError, match="scales"):
        int8_linear(x, weight, ones.half(), None, out)
    with pytest.raises(ValueError, match="x "):
        int8_linear(x[:, :8], weight, ones, None, out)
    assert (out == CANARY).all()
