"""RMSNorm and LayerNorm of rows, with or without an addition before.

A program has one whole row in registers, so that it is read once and written once however
many sums need it; what limits is memory. The addition is stored rounded, and what is
normed is the rounded row, as if the two had been separate.

Sources: Zhang and Sennrich 2019, arXiv:1910.07467; Ba et al. 2016, arXiv:1607.06450.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803 (constants of a kernel are in capitals)

import torch
import triton
import triton.language as tl

from compute.kernels.triton.checks import check_list, check_rows, check_same_device
from compute.kernels.triton.launch import Config, Launch, power_of_two
from compute.kernels.triton.tuning import run_all

MAX_SIZE = 32768  # of a row: 32 elements for each of 1024 threads


@triton.jit
def norm_kernel(
    # pointers
    x,
    residual,
    weight,
    bias,
    out,
    # sizes
    size,
    eps,
    # strides
    x_row,
    residual_row,
    out_row,
    # constants
    SIZE_PAD: tl.constexpr,
    ADDS: tl.constexpr,
    CENTRES: tl.constexpr,
):
    """Program (row). CENTRES: LayerNorm, which has a bias."""
    t = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE_PAD)
    is_column = columns < size
    row = tl.load(x + t * x_row + columns, mask=is_column, other=0.0).to(tl.float32)
    if ADDS:
        residual_at = residual + t * residual_row + columns
        before = tl.load(residual_at, mask=is_column, other=0.0).to(tl.float32)
        stored = (before + row).to(residual.dtype.element_ty)
        tl.store(residual_at, stored, mask=is_column)
        row = stored.to(tl.float32)
    if CENTRES:
        row = tl.where(is_column, row - tl.sum(row, axis=0) / size, 0.0)
    factor = 1.0 / tl.sqrt_rn(tl.sum(row * row, axis=0) / size + eps)
    normed = row * factor * tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    if CENTRES:
        normed += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + t * out_row + columns, normed.to(out.dtype.element_ty), mask=is_column)


def plan(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
) -> list[Launch]:
    """The launch of a norm: with a bias LayerNorm, else RMSNorm.

    Raises ValueError for tensors that do not fit. Nothing runs.
    """
    shape = tuple(out.shape)
    check_rows("out", out, shape, out.dtype)
    check_rows("x", x, shape, out.dtype)
    check_list("weight", weight, shape[1:], out.dtype)
    if residual is not None:
        check_rows("residual", residual, shape, out.dtype)
    if bias is not None:
        check_list("bias", bias, shape[1:], out.dtype)
    check_same_device(out, x=x, residual=residual, weight=weight, bias=bias)
    num_rows, size = shape
    if not 0 < size <= MAX_SIZE:
        raise ValueError(f"out {shape}: need rows of up to {MAX_SIZE}")
    size_pad = power_of_two(size)
    launch = Launch(
        norm_kernel,
        (num_rows,),
        {
            "x": x,
            "residual": x if residual is None else residual,
            "weight": weight,
            "bias": weight if bias is None else bias,
            "out": out,
            "size": size,
            "eps": eps,
            "x_row": x.stride(0),
            "residual_row": 0 if residual is None else residual.stride(0),
            "out_row": out.stride(0),
            "SIZE_PAD": size_pad,
            "ADDS": residual is not None,
            "CENTRES": bias is not None,
        },
        # 16 elements of a thread leave room for several programs at a time.
        Config(min(32, max(1, size_pad // 512))),
        (2 if residual is None else 4) * size * out.element_size(),
    )
    return [launch]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """Kernels.rms_norm. As all here, raises ValueError for tensors that do not fit."""
    run_all(plan(x, None, weight, None, eps, out))


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """Kernels.add_rms_norm."""
    run_all(plan(x, residual, weight, None, eps, out))


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """Kernels.layer_norm."""
    run_all(plan(x, None, weight, bias, eps, out))


def add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> None:
    """Kernels.add_layer_norm."""
    run_all(plan(x, residual, weight, bias, eps, out))
