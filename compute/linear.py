"""Matrix products with fixed weights, each called the fastest way the library offers.

Measured on an AVX2 machine with the shapes of a 135M model, one thread, fp32, ms for ten
layers (the ratios hold for two): oneDNN with weights packed once takes 10, 19, 49, 135
against 14, 24, 54, 138 of torch's linear at 1, 8, 32 and 128 rows, and is on a par at 512.
So packed weights serve every size, and are the only copy. The hint of the row count that
packing takes made no difference above the noise; without one it was best at 1 row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_Product = Callable[[torch.Tensor], torch.Tensor]


class Linear:
    """x [T, in] -> [T, out], T at least 1, in the dtype of the weights given.

    The weights are packed into a copy; who keeps the dense ones too (a tied embedding
    needs them for its lookup) pays for both.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight [out, in], bias [out], both fp32 or bf16."""
        self._product = _packed(weight, bias) or _widened(weight, bias) or _plain(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x)


def _packed(weight: torch.Tensor, bias: torch.Tensor | None) -> _Product | None:
    """oneDNN with weights in its own order; None where it or the processor cannot."""
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight.default(weight.detach())
        multiply = torch.ops.mkldnn._linear_pointwise.default
        multiply(weight.new_zeros(1, weight.shape[1]), packed, bias, "none", [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return None

    def product(x: torch.Tensor) -> torch.Tensor:
        return multiply(x, packed, bias, "none", [], "")

    return product


def _widened(weight: torch.Tensor, bias: torch.Tensor | None) -> _Product | None:
    """bf16 on a processor that cannot multiply it: fp32 weights, four to seven times as
    fast there as torch's bf16 product, at twice the memory."""
    if weight.dtype != torch.bfloat16:
        return None
    multiply = _packed(weight.float(), None if bias is None else bias.float())
    if multiply is None:
        return None

    def product(x: torch.Tensor) -> torch.Tensor:
        return multiply(x.float()).to(torch.bfloat16)

    return product


def _plain(weight: torch.Tensor, bias: torch.Tensor | None) -> _Product:
    def product(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight, bias)

    return product
