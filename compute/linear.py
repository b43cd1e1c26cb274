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
    """A product on the CPU, in the dtype of the weights: fp32 or bf16, summed in fp32.

    Keeps the weights once, packed (see compute.kernels.cpu.product). Rows of the result
    do not depend on each other.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight [out, in], bias [out]. Raises ValueError if they are not fp32 or bf16."""
        self._dtype = _checked_dtype(weight)
        self._packed = _Packed(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._packed.multiplied(x, self._dtype)

    def fp32(self, x: torch.Tensor) -> torch.Tensor:
        return self._packed.multiplied(x, torch.float32)

    def weight_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return self._packed.rows(rows)


class Int8Linear:
    """A product on the CPU with weights in int8 and a scale for each output; the rest is
    as in Linear. Half the bytes of bf16, of which a small batch waits for every one.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight [out, in], bias [out]. Raises ValueError if they are not fp32 or bf16."""
        self._dtype = _checked_dtype(weight)
        rounded, self._scales = quantized(weight)
        self._packed = _Packed(rounded, bias, self._scales)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._packed.multiplied(x, self._dtype)

    def fp32(self, x: torch.Tensor) -> torch.Tensor:
        return self._packed.multiplied(x, torch.float32)

    def weight_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return (self._packed.rows(rows) * self._scales[rows, None]).to(self._dtype)


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [out, in] -> int8 [out, in] and scales [out] in fp32, whose product it nearly is.

    Symmetric: the largest of a row becomes 127 or -127.
    """
    largest = weight.float().abs().amax(dim=1)
    scales = torch.where(largest > 0, largest / 127, 1.0)
    return torch.round(weight.float() / scales[:, None]).to(torch.int8), scales


class _Packed:
    """Weights as compute.kernels.cpu.product wants them."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, scales: torch.Tensor | None = None
    ) -> None:
        self._team = threads.team()
        self._num_outputs = weight.shape[0]
        self._weight = product.pack(weight)
        self._bias = self._of_panels(bias)
        self._scales = None if scales is None else self._of_panels(scales)

    def multiplied(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(x.shape[0], self._num_outputs, dtype=dtype)
        product.multiply(self._team, x.float(), self._weight, self._bias, out, self._scales)
        return out

    def rows(self, rows: torch.Tensor) -> torch.Tensor:
        return product.unpack_rows(self._weight, rows)

    def _of_panels(self, values: torch.Tensor | None) -> torch.Tensor:
        """[out] in fp32, filled up with zeros."""
        filled = torch.zeros(self._weight.shape[0] * product.PANEL)
        if values is not None:
            filled[: self._num_outputs] = values
        return filled


def _checked_dtype(weight: torch.Tensor) -> torch.dtype:
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"weights are {weight.dtype}: need fp32 or bf16")
    return weight.dtype
