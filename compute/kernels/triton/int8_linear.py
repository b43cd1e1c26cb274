"""Products with weights of one byte: int8, with an fp32 scale for each output.

A program makes ROWS × OUTPUTS results, over tiles of INPUTS of the shared dimension.
Weights become operands of x's dtype exactly, and the scale is applied once at the end,
since it is the same for a whole column of results: nothing is rounded that would not be
with weights of 16 bits.

For few rows the weights' bytes limit, of which there are half as many as in 16 bits; for
hundreds of rows the tensor cores do. A row's result does not depend on the other rows of
its tile, but tiles are larger for more rows, and with them the order of sums may change.

Source: Dettmers et al. 2022, arXiv:2208.07339 (scales by output; without outliers here).
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803 (constants of a kernel are in capitals)

import torch
import triton
import triton.language as tl

from compute.kernels.triton.checks import check_list, check_rows, check_same_device, words
from compute.kernels.triton.elements import operand_of
from compute.kernels.triton.launch import Config, Launch, Target, pieces, target_of
from compute.kernels.triton.tuning import FIRST, Tuner


@triton.jit(do_not_specialize=["num_rows"])
def int8_linear_kernel(
    # pointers
    x,
    weight,
    scales,
    bias,
    out,
    # sizes
    num_rows,
    num_outputs,
    num_inputs,
    # strides
    x_row,
    weight_row,
    out_row,
    # constants
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    OPERAND: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Program (tile of outputs, tile of rows). EVEN: INPUTS divides num_inputs."""
    rows = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    outputs = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    inputs = tl.arange(0, INPUTS)
    is_row = (rows < num_rows)[:, None]
    is_output = (outputs < num_outputs)[None, :]
    x_at = x + rows[:, None] * x_row + inputs[None, :]
    weight_at = weight + outputs[None, :] * weight_row + inputs[:, None]
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in tl.range(0, num_inputs, INPUTS):
        if EVEN:
            left = tl.load(x_at + start, mask=is_row, other=0.0)
            right = tl.load(weight_at + start, mask=is_output, other=0)
        else:
            is_input = start + inputs < num_inputs
            left = tl.load(x_at + start, mask=is_row & is_input[None, :], other=0.0)
            right = tl.load(weight_at + start, mask=is_output & is_input[:, None], other=0)
        acc = tl.dot(left.to(OPERAND), right.to(OPERAND), acc, input_precision="ieee")
    result = acc * tl.load(scales + outputs, mask=outputs < num_outputs, other=0.0)[None, :]
    if BIAS:
        added = tl.load(bias + outputs, mask=outputs < num_outputs, other=0.0)
        result += added.to(tl.float32)[None, :]
    out_at = out + rows[:, None] * out_row + outputs[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=is_row & is_output)


def candidates(num_rows: int) -> list[tuple[int, int, int, Config]]:
    """(rows, outputs, inputs, configuration) worth a try, the one to use untried first.

    Few rows: narrow tiles, so that there are enough programs to keep memory busy.
    """
    if num_rows <= 16:
        return [
            (16, 32, 256, Config(4, 3)),
            (16, 32, 128, Config(4, 4)),
            (16, 64, 128, Config(4, 4)),
            (16, 16, 256, Config(2, 4)),
        ]
    if num_rows <= 64:
        return [
            (64, 64, 64, Config(4, 3)),
            (64, 64, 128, Config(4, 3)),
            (64, 128, 64, Config(8, 3)),
        ]
    return [(128, 128, 64, Config(8, 3)), (128, 64, 64, Config(4, 3)), (64, 128, 64, Config(4, 3))]


def plan(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    target: Target | None = None,
    choice: int = 0,
) -> list[Launch]:
    """The launch of int8_linear, which has the shapes. Raises ValueError; nothing runs."""
    target = target or target_of(x)
    if weight.dim() != 2 or weight.dtype != torch.int8 or weight.stride(1) != 1:
        raise ValueError(f"{words('weight', weight)}: need dense rows of int8 [out, in]")
    num_outputs, num_inputs = weight.shape
    check_rows("x", x, (x.shape[0], num_inputs), x.dtype)
    check_rows("out", out, (x.shape[0], num_outputs), out.dtype)
    check_list("scales", scales, (num_outputs,), torch.float32)
    if bias is not None:
        check_list("bias", bias, (num_outputs,), bias.dtype)
    check_same_device(x, weight=weight, scales=scales, bias=bias, out=out)
    rows, outputs, inputs, config = candidates(x.shape[0])[choice]
    launch = Launch(
        int8_linear_kernel,
        (pieces(num_outputs, outputs), pieces(x.shape[0], rows)),
        {
            "x": x,
            "weight": weight,
            "scales": scales,
            "bias": scales if bias is None else bias,
            "out": out,
            "num_rows": x.shape[0],
            "num_outputs": num_outputs,
            "num_inputs": num_inputs,
            "x_row": x.stride(0),
            "weight_row": weight.stride(0),
            "out_row": out.stride(0),
            "ROWS": rows,
            "OUTPUTS": outputs,
            "INPUTS": inputs,
            "OPERAND": operand_of(x.dtype, target),
            "EVEN": num_inputs % inputs == 0,
            "BIAS": bias is not None,
        },
        config,
        inputs * (outputs + rows * x.element_size()),
    )
    return [launch]


def int8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tuner: Tuner = FIRST,
) -> None:
    """out = x @ (weight * scales[:, None]).T + bias, summed in fp32.

    x       [T, in]    fp32, bf16 or fp16, rows may lie apart
    weight  [out, in]  int8; scales [out] fp32: a weight is worth weight * scale
    bias    [out] or None
    out     [T, out]   x's dtype or fp32
    Raises ValueError for tensors that do not fit; then nothing has run.
    """
    kind = 0 if x.shape[0] <= 16 else 1 if x.shape[0] <= 64 else 2
    tuner.run(
        ("int8_linear", x.dtype, out.dtype, weight.shape, kind),
        lambda: len(candidates(x.shape[0])),
        lambda choice: plan(x, weight, scales, bias, out, choice=choice),
    )
