"""Products with packed weights."""

from __future__ import annotations

import pytest
import torch

from compute.linear import Int8Linear, Linear, quantized


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 8, 64])
def test_product_equals_torchs(dtype, has_bias, num_rows):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    bias = torch.randn(96, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(num_rows, 64, generator=generator).to(dtype)
    before = (x.clone(), weight.clone())
    out = Linear(weight, bias)(x)
    expected = torch.nn.functional.linear(x, weight, bias)
    assert out.dtype == dtype
    # bf16: 8 significant bits; fp32: sums in another order
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(x, before[0])
    assert torch.equal(weight, before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_outputs", "depth"), [(1, 3), (17, 8), (40, 100), (48, 7)])
def test_product_of_any_size_equals_torchs(dtype, num_outputs, depth):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(num_outputs, depth, generator=generator).to(dtype)
    x = torch.randn(9, depth, generator=generator).to(dtype)
    expected = x.double() @ weight.double().t()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    out = Linear(weight, None)(x).double()
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


def test_fp32_results_of_bf16_weights_are_not_rounded():
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(40, 100, generator=generator).bfloat16()
    x = torch.randn(9, 100, generator=generator).bfloat16()
    linear = Linear(weight, None)
    out = linear.fp32(x)
    expected = x.double() @ weight.double().t()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(out.bfloat16(), linear(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_gets_the_same_result_alone_and_in_any_batch(dtype):
    generator = torch.Generator().manual_seed(2)
    linear = Linear(torch.randn(70, 50, generator=generator).to(dtype), None)
    x = torch.randn(40, 50, generator=generator).to(dtype)
    together = linear(x)
    for num_rows in (1, 2, 5, 6, 7, 13):
        assert torch.equal(linear(x[:num_rows]), together[:num_rows])
    assert torch.equal(linear(x[39:]), together[39:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_the_weight_can_be_looked_up(dtype):
    weight = torch.randn(37, 24).to(dtype)
    rows = torch.tensor([36, 0, 15, 16, 36])
    assert torch.equal(Linear(weight, None).weight_rows(rows), weight[rows])


def test_tensors_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="float64"):
        Linear(torch.randn(8, 16).double(), None)
    with pytest.raises(ValueError, match="need fp32"):
        Linear(torch.randn(8, 16), None)(torch.randn(2, 15))


# Weights in int8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_outputs", "depth"), [(1, 3), (17, 8), (96, 64), (40, 100)])
def test_int8_products_are_those_of_the_quantized_weights(dtype, has_bias, num_outputs, depth):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(num_outputs, depth, generator=generator).to(dtype)
    bias = torch.randn(num_outputs, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(9, depth, generator=generator).to(dtype)
    rounded, scales = quantized(weight)
    assert rounded.dtype == torch.int8
    near = rounded.double() * scales.double()[:, None]
    # Half a step of 127 to the largest of the row.
    most = weight.double().abs().amax(1, keepdim=True)
    assert ((near - weight.double()).abs() <= most / 253).all()
    expected = x.double() @ near.t() + (0 if bias is None else bias.double())
    linear = Int8Linear(weight, bias)
    torch.testing.assert_close(linear.fp32(x).double(), expected, rtol=1e-5, atol=1e-5)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert linear(x).dtype == dtype
    torch.testing.assert_close(linear(x).double(), expected, rtol=tolerance, atol=tolerance)
    rows = torch.tensor([num_outputs - 1, 0])
    assert torch.equal(linear.weight_rows(rows), near[rows].float().to(dtype))


def test_an_int8_row_gets_the_same_result_alone_and_in_any_batch():
    generator = torch.Generator().manual_seed(2)
    linear = Int8Linear(torch.randn(70, 50, generator=generator), None)
    x = torch.randn(40, 50, generator=generator)
    together = linear(x)
    for num_rows in (1, 2, 5, 6, 7, 13):
        assert torch.equal(linear(x[:num_rows]), together[:num_rows])


def test_rows_of_zeros_stay_zeros_in_int8():
    weight = torch.zeros(3, 8)
    weight[1] = 5
    out = Int8Linear(weight, None)(torch.ones(1, 8))
    torch.testing.assert_close(out, torch.tensor([[0.0, 40.0, 0.0]]))
