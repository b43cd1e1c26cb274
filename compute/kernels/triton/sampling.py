"""Tokens from rows of scores: the likeliest, or one drawn by inverse CDF.

A program takes one row, in tiles of TILE ids, three times: for the largest, for the sums
of exponentials, and for the id at which the cumulative sum, in the order of ids, passes
the given share of the whole. A row of 128k scores is 512 KiB, so the later passes mostly
find it in the L2 cache. Cumulative sums are in fp64, as in compute.sampling.drawing: in
fp32 the last of 128k ids would get what rounding leaves over. With equal uniforms both
draw the same id, unless the share falls within rounding of the edge between two.

Source: Devroye 1986, Non-Uniform Random Variate Generation, chapter III.2.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803 (constants of a kernel are in capitals)

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from compute.kernels.triton.attention import LOG2_E
from compute.kernels.triton.checks import check_list, check_rows, check_same_device, words
from compute.kernels.triton.launch import Config, Launch
from compute.kernels.triton.tuning import run_all

TILE = 2048
# As in compute.sampling.limits: outside of these fp32 would divide by zero, or 0 by infinity.
MIN_TEMPERATURE = tl.constexpr(1e-6)
MAX_TEMPERATURE = tl.constexpr(1e30)
_NO_ID = tl.constexpr(2**31 - 1)


class Drawn(NamedTuple):
    """For each row: token_ids [K] int64; logprobs [K] fp32, theirs at temperature 1;
    logsumexps [K] fp32."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    logsumexps: torch.Tensor


@triton.jit
def sample_kernel(
    # pointers
    logits,
    temperatures,
    uniforms,
    token_ids,
    logprobs,
    logsumexps,
    # sizes
    size,
    # strides
    row_stride,
    # constants
    TILE: tl.constexpr,
    DRAWS: tl.constexpr,
):
    """Program (row)."""
    k = tl.program_id(0).to(tl.int64)
    row = logits + k * row_stride
    lanes = tl.arange(0, TILE)

    largest = tl.full([TILE], float("-inf"), tl.float32)
    places = tl.full([TILE], _NO_ID, tl.int32)
    for start in range(0, size, TILE):
        ids = start + lanes
        scores = tl.load(row + ids, mask=ids < size, other=float("-inf"))
        # Not >=: the lowest id among equals.
        is_better = (scores > largest) | ((places == _NO_ID) & (ids < size))
        largest = tl.where(is_better, scores, largest)
        places = tl.where(is_better, ids, places)
    most = tl.max(largest, axis=0)
    token = tl.min(tl.where(largest == most, places, _NO_ID), axis=0)

    temperature = 1.0
    if DRAWS:
        temperature = tl.load(temperatures + k)
    divisor = tl.minimum(tl.maximum(temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)
    weights = tl.zeros([TILE], tl.float32)
    total = tl.full([1], 0.0, tl.float64)
    for start in range(0, size, TILE):
        ids = start + lanes
        scores = tl.load(row + ids, mask=ids < size, other=float("-inf"))
        weights += tl.exp2((scores - most) * LOG2_E)
        if DRAWS:
            heats = tl.exp2((scores - most) / divisor * LOG2_E).to(tl.float64)
            total += tl.sum(heats, axis=0)
    logsumexp = most + tl.log(tl.sum(weights, axis=0))

    if DRAWS:  # noqa: SIM102 (the outer one is decided when it is compiled)
        if temperature > 0:
            share = tl.load(uniforms + k).to(tl.float64) * tl.sum(total, axis=0)
            before = tl.sum(tl.full([1], 0.0, tl.float64), axis=0)
            found = -1
            last = -1  # rounding can put the share at the very end
            start = 0
            while (start < size) & (found < 0):
                ids = start + lanes
                scores = tl.load(row + ids, mask=ids < size, other=float("-inf"))
                heats = tl.exp2((scores - most) / divisor * LOG2_E).to(tl.float64)
                last = tl.maximum(last, tl.max(tl.where(heats > 0, ids, -1), axis=0))
                after = before + tl.sum(heats, axis=0)
                if after > share:
                    passed = (before + tl.cumsum(heats, axis=0) > share) & (heats > 0)
                    first = tl.min(tl.where(passed, ids, _NO_ID), axis=0)
                    found = tl.where(first == _NO_ID, last, first)
                before = after
                start += TILE
            token = tl.where(found < 0, last, found)
    tl.store(token_ids + k, token.to(tl.int64))
    tl.store(logprobs + k, tl.load(row + token) - logsumexp)
    tl.store(logsumexps + k, logsumexp)


def plan(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None,
    uniforms: torch.Tensor | None,
    drawn: Drawn,
) -> list[Launch]:
    """The launch of draw, or without temperatures of likeliest, which have the shapes.

    Raises ValueError for tensors that do not fit. Nothing runs.
    """
    num_rows, size = logits.shape
    check_rows("logits", logits, (num_rows, size), torch.float32)
    if not 0 < size < 2**31 - TILE:
        raise ValueError(f"{words('logits', logits)}: need at least one score in a row")
    if temperatures is not None and uniforms is not None:
        check_list("temperatures", temperatures, (num_rows,), torch.float32)
        if uniforms.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{words('uniforms', uniforms)}: need fp32 or fp64")
        check_list("uniforms", uniforms, (num_rows,), uniforms.dtype)
        check_same_device(logits, temperatures=temperatures, uniforms=uniforms)
    launch = Launch(
        sample_kernel,
        (num_rows,),
        {
            "logits": logits,
            "temperatures": logits if temperatures is None else temperatures,
            "uniforms": logits if uniforms is None else uniforms,
            "token_ids": drawn.token_ids,
            "logprobs": drawn.logprobs,
            "logsumexps": drawn.logsumexps,
            "size": size,
            "row_stride": logits.stride(0),
            "TILE": TILE,
            "DRAWS": temperatures is not None,
        },
        Config(8),
        TILE * 4,
    )
    return [launch]


def likeliest(logits: torch.Tensor) -> Drawn:
    """Of logits [K, V] fp32, whose rows may lie apart: the lowest id among equals.

    A row needs one finite score; others may be -inf.
    Raises ValueError for tensors that do not fit; then nothing has run.
    """
    drawn = room_for(logits)
    run_all(plan(logits, None, None, drawn))
    return drawn


def draw(logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor) -> Drawn:
    """The first id of logits [K, V], as above, whose cumulative probability exceeds a uniform.

    temperatures  [K] fp32; 0: the likeliest
    uniforms      [K] fp32 or fp64, in [0, 1)
    Raises ValueError for tensors that do not fit; then nothing has run.
    """
    drawn = room_for(logits)
    run_all(plan(logits, temperatures, uniforms, drawn))
    return drawn


def room_for(logits: torch.Tensor) -> Drawn:
    num_rows, device = logits.shape[0], logits.device
    return Drawn(
        torch.empty(num_rows, dtype=torch.int64, device=device),
        torch.empty(num_rows, dtype=torch.float32, device=device),
        torch.empty(num_rows, dtype=torch.float32, device=device),
    )
