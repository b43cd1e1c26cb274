"""Matrix products with fixed weights."""

from __future__ import annotations

from typing import Protocol

import torch

from compute import threads
from compute.kernels.cpu import product


class Product(Protocol):
    """A product with fixed weights [out, in], on some device."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> [T, out], in the type of activations."""

    def fp32(self, x: torch.Tensor) -> torch.Tensor:
        """The result in fp32, not rounded to the type of activations."""

    def weight_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, [T] -> [T, in]: the lookup of an embedding tied to it."""


class Linear:
    """x [T, in] -> [T, out], in the dtype of the weights: fp32 or bf16, summed in fp32.

    `fp32` keeps the sums as they are.

    Keeps the weights once, packed (see compute.kernels.cpu.product). Rows of the result
    do not depend on each other.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight [out, in], bias [out]. Raises ValueError if they are not fp32 or bf16."""
        if weight.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"weights are {weight.dtype}: need fp32 or bf16")
        self._team = threads.team()
        self._num_outputs = weight.shape[0]
        self._packed = product.pack(weight)
        self._bias = torch.zeros(self._packed.shape[0] * product.PANEL)
        if bias is not None:
            self._bias[: self._num_outputs] = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, self._packed.dtype)

    def fp32(self, x: torch.Tensor) -> torch.Tensor:
        """The result in fp32, not rounded to the dtype of the weights."""
        return self._product(x, torch.float32)

    def _product(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(x.shape[0], self._num_outputs, dtype=dtype)
        product.multiply(self._team, x.float(), self._packed, self._bias, out)
        return out

    def weight_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, [T] -> [T, in]: the lookup of an embedding tied to it."""
        return product.unpack_rows(self._packed, rows)
