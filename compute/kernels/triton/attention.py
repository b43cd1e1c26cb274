"""One turn of the online softmax, shared by decode and prefill.

A program keeps, for each row (one query of one head), the largest score so far `most`,
the sum of weights `total` and the weighted sum of values `acc`; a tile of KV changes all
three (docs/kernels.md derives it). Scores are kept in units of log 2, since 2^x is what
the hardware computes.

Rows never mix, and a position that a row does not see adds exactly nothing: its score is
-inf, its weight 0. So a row's result depends on the order of tiles only, not on what
other rows the program has nor on how far past the row's own position its tiles reach.

Sources: Milakov and Gimelshein 2018, arXiv:1805.02867; Dao 2023, arXiv:2307.08691.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803 (constants of a kernel are in capitals)

import triton
import triton.language as tl

from compute.kernels.triton.elements import from_pool

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def bent(scores, scale, softcap, SOFTCAP: tl.constexpr):
    """Scaled and capped scores, in units of log 2."""
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), finite for every x
        doubled = scores * (2.0 * scale / softcap)
        capped = softcap - 2.0 * softcap / (tl.exp2(doubled * LOG2_E) + 1.0)
        result = capped * LOG2_E
    else:
        result = scores * (scale * LOG2_E)
    return result


@triton.jit
def attend_tile(
    # state of the rows
    q,
    row_position,
    row_slope,
    most,
    total,
    acc,
    # pointers, already at the KV head
    kv,
    scales,
    table,
    # sizes
    start,
    begin,
    end,
    window,
    scale,
    softcap,
    # strides
    kv_block,
    kv_part,
    kv_token,
    scales_block,
    scales_part,
    scales_token,
    # constants
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    STORAGE: tl.constexpr,
    OPERAND: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SLOPES: tl.constexpr,
):
    """Let rows attend to positions start … start + TILE - 1; loads only begin … end - 1.

    q             [R, HEAD_PAD]  of OPERAND; row_position, row_slope [R]
    most, total   [R] fp32;  acc [R, HEAD_PAD] fp32
    MASKED        False where every row sees every position of the tile
    returns       most, total, acc
    """
    positions = start + tl.arange(0, TILE)
    columns = tl.arange(0, HEAD_PAD)
    is_column = columns < HEAD
    within = (positions >= begin) & (positions < end)
    if MASKED:
        block_ids = tl.load(table + positions // BLOCK, mask=within, other=0)
    else:
        block_ids = tl.load(table + positions // BLOCK)
    slots = block_ids.to(tl.int64) * kv_block + (positions % BLOCK) * kv_token
    keys_at = kv + slots[None, :] + columns[:, None]
    values_at = kv + kv_part + slots[:, None] + columns[None, :]
    if MASKED:
        keys = tl.load(keys_at, mask=within[None, :] & is_column[:, None], other=0)
    elif HEAD == HEAD_PAD:
        keys = tl.load(keys_at)
    else:
        keys = tl.load(keys_at, mask=is_column[:, None], other=0)

    scores = tl.dot(q, from_pool(keys, STORAGE, OPERAND), input_precision="ieee")
    if STORAGE != "plain":
        scale_slots = block_ids.to(tl.int64) * scales_block + (positions % BLOCK) * scales_token
        key_scales = tl.load(scales + scale_slots, mask=within, other=0.0)
        scores *= key_scales[None, :]
    scores = bent(scores, scale, softcap, SOFTCAP)
    distance = positions[None, :] - row_position[:, None]
    if SLOPES:
        scores += (row_slope * LOG2_E)[:, None] * distance.to(tl.float32)
    if MASKED:
        seen = distance <= 0
        if WINDOW:
            seen = seen & (distance > -window)
        scores = tl.where(seen, scores, float("-inf"))

    most_now = tl.maximum(most, tl.max(scores, axis=1))
    # A row that has seen nothing yet must not subtract infinities.
    base = tl.where(most_now == float("-inf"), 0.0, most_now) if MASKED else most_now
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(most - base)
    total = total * shrink + tl.sum(weights, axis=1)

    if MASKED:
        values = tl.load(values_at, mask=within[:, None] & is_column[None, :], other=0)
    elif HEAD == HEAD_PAD:
        values = tl.load(values_at)
    else:
        values = tl.load(values_at, mask=is_column[None, :], other=0)
    numbers = from_pool(values, STORAGE, OPERAND)
    acc = acc * shrink[:, None]
    if STORAGE == "plain":
        acc = tl.dot(weights.to(OPERAND), numbers, acc, input_precision="ieee")
    else:
        value_scales = tl.load(scales + scales_part + scale_slots, mask=within, other=0.0)
        weights *= value_scales[None, :]
        if tl.float16 == OPERAND:
            # Scales can be too small for fp16: each row is brought to 1 first.
            largest = tl.max(weights, axis=1)
            largest = tl.where(largest > 0, largest, 1.0)
            weights *= (1.0 / largest)[:, None]
            sums = tl.dot(weights.to(OPERAND), numbers, input_precision="ieee")
            acc += sums * largest[:, None]
        else:
            acc = tl.dot(weights.to(OPERAND), numbers, acc, input_precision="ieee")
    return most_now, total, acc
