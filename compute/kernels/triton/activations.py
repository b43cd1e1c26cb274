"""Activations of rows, alone or times a second half. Memory limits.

A program takes TILE columns of one row.

Sources: Hendrycks and Gimpel 2016, arXiv:1606.08415 (gelu); Shazeer 2020,
arXiv:2002.05202 (gated ones).
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803 (constants of a kernel are in capitals)

from typing import get_args

import torch
import triton
import triton.language as tl

from compute.kernels import Activation
from compute.kernels.triton.attention import LOG2_E
from compute.kernels.triton.checks import check_rows, check_same_device
from compute.kernels.triton.launch import Config, Launch, pieces, power_of_two
from compute.kernels.triton.tuning import run_all

TILE = 1024
KINDS = get_args(Activation)


@triton.jit
def activated(x, KIND: tl.constexpr):
    """fp32 to fp32; finite at both ends, and NaN stays NaN."""
    if KIND == "silu":
        result = x / (1.0 + tl.exp2(x * -LOG2_E))
    elif KIND == "relu":
        result = tl.where(x > 0, x, x * 0.0)  # NaN times 0 is NaN
    elif KIND == "gelu":
        result = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # 0.5 (1 + tanh(y)) = 1 / (1 + exp(-2 y)); 2 sqrt(2/π) = 1.5957691…
        doubled = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        result = x / (1.0 + tl.exp2(doubled * -LOG2_E))
    return result


@triton.jit
def activate_kernel(
    # pointers
    x,
    out,
    # sizes
    size,
    # strides
    x_row,
    out_row,
    # constants
    KIND: tl.constexpr,
    TIMES_SECOND: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row, tile of columns)."""
    t = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = columns < size
    at = x + t * x_row + columns
    result = activated(tl.load(at, mask=is_column, other=0.0).to(tl.float32), KIND)
    if TIMES_SECOND:
        result *= tl.load(at + size, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + t * out_row + columns, result.to(out.dtype.element_ty), mask=is_column)


def plan(
    kind: Activation, x: torch.Tensor, out: torch.Tensor, *, times_second: bool
) -> list[Launch]:
    """The launch of an activation of x, or of its first half times its second.

    Raises ValueError for tensors that do not fit. Nothing runs.
    """
    if kind not in KINDS:
        raise ValueError(f"activation {kind!r}: need one of {KINDS}")
    num_rows, size = out.shape
    check_rows("out", out, (num_rows, size), out.dtype)
    width = 2 * size if times_second else size
    check_rows("gate_up" if times_second else "x", x, (num_rows, width), out.dtype)
    check_same_device(out, x=x)
    tile = min(TILE, power_of_two(max(size, 1)))
    launch = Launch(
        activate_kernel,
        (num_rows, pieces(size, tile)),
        {
            "x": x,
            "out": out,
            "size": size,
            "x_row": x.stride(0),
            "out_row": out.stride(0),
            "KIND": kind,
            "TIMES_SECOND": times_second,
            "TILE": tile,
        },
        Config(4),
        (3 if times_second else 2) * tile * out.element_size(),
    )
    return [launch]


def activate(kind: Activation, x: torch.Tensor, out: torch.Tensor) -> None:
    """Kernels.activate. As activate_mul, raises ValueError for tensors that do not fit."""
    run_all(plan(kind, x, out, times_second=False))


def activate_mul(kind: Activation, gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """Kernels.activate_mul."""
    run_all(plan(kind, gate_up, out, times_second=True))
