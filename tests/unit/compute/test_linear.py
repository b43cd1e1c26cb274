"""Products with packed weights equal plain ones."""

from __future__ import annotations

import pytest
import torch

from compute.linear import Linear


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


def test_product_works_without_the_packing_operator(monkeypatch):
    monkeypatch.setattr("compute.linear._packed", lambda *_: None)
    weight, x = torch.randn(8, 16), torch.randn(2, 16)
    assert torch.equal(Linear(weight, None)(x), torch.nn.functional.linear(x, weight))
