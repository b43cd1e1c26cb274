"""A chunk of queries of one sequence against its paged keys and values, causally.

A thread takes one KV head and a tile of queries at a time, and walks over the sequence in
pieces of PIECE tokens, straight from the blocks: scores, softmax, weighted values, merged
with the pieces before. Pieces start at multiples of PIECE whatever the chunk, so that the
result of a query does not depend on how the prompt was cut into chunks.

Sources: Dao et al. 2022, arXiv:2205.14135 (attention in tiles); Kwon et al. 2023,
arXiv:2309.06180 (KV in pages).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from compute.kernels.cpu.jit import (
    LOWEST,
    bits_to_f64,
    elements,
    f32_at,
    f32_plus,
    helper,
    i32_at,
    kernel,
    load,
    thread_number,
)
from compute.kernels.cpu.softmax import PIECE, absorb, bend, finish, merge_into
from compute.kernels.cpu.vectors import add_values, scores

_ROWS = 96  # rows of a tile of queries, one per query and head: they fit the second cache


def queries_per_tile(group: int) -> int:
    return max(1, _ROWS // group)


def scratch_floats(group: int, head_size: int) -> int:
    """Room per thread: queries, scores, and of each row an accumulator, a maximum and a
    sum, of a piece and of all."""
    return queries_per_tile(group) * group * (3 * head_size + PIECE + 4)


@helper
def absorb_rows(acc, best, p, num_rows, group, visible, count, window, size):  # type: ignore[no-untyped-def]
    """Absorb a piece of `count` tokens in each row; its first query sees those before
    `visible`, from `visible - window` on if there is a window.

    Weights of tokens that a query does not see are 0.
    """
    for row in range(num_rows):
        seen = max(0, min(visible + row // group, count))
        if window > 0 and visible + row // group - window >= seen:
            seen = np.int64(0)
        weights = f32_plus(p, row * PIECE)
        if seen > 0:
            absorb(f32_plus(acc, row * size), f32_plus(best, 2 * row), weights, seen, size)
        for b in range(seen, count):
            weights[b] = np.float32(0)


@helper
def bend_rows(p, num_rows, group, visible, count, window, softcap, slopes):  # type: ignore[no-untyped-def]
    """Apply AttentionOptions to the scores of a piece; `slopes` of these heads, or 0."""
    for row in range(num_rows):
        ahead = visible + row // group  # tokens of the piece up to the query
        hidden = max(0, ahead - window) if window > 0 else np.int64(0)
        slope = np.float32(0)
        if slopes != 0:
            slope = f32_at(slopes)[row % group]
        bend(f32_plus(p, row * PIECE), count, hidden, 1 - ahead, softcap, slope)


@helper
def merge_rows(  # type: ignore[no-untyped-def]
    all_acc, all_best, acc, best, num_rows, group, visible, count, window, size
):
    """Merge a piece of `count` tokens into the rows whose queries see some of it."""
    for row in range(num_rows):
        ahead = visible + row // group
        if ahead <= 0 or (window > 0 and ahead - window >= min(ahead, count)):
            continue
        ours, theirs = f32_plus(all_best, 2 * row), f32_plus(best, 2 * row)
        ours_acc, their_acc = f32_plus(all_acc, row * size), f32_plus(acc, row * size)
        if ours[1] == 0:  # the first piece that it sees
            ours[0], ours[1] = theirs[0], theirs[1]
            for d in range(size):
                ours_acc[d] = their_acc[d]
        else:
            merge_into(ours_acc, ours, their_acc, theirs, size)


@functools.cache
def paged_prefill_kernel(head_size: int, group: int, bf16: bool, bent: bool) -> Any:
    """Kernels.paged_prefill of one chunk; `bent`: with options.

    Arguments: team (2); q, its row stride; out, stride; kv, strides of its first four
    axes, B; block_table; T; Hkv; seq_len; scale (double); scratch, its floats per thread;
    window; softcap (double); slopes or 0.
    """
    most_queries = queries_per_tile(group)
    most_rows = most_queries * group

    def paged_prefill(arguments):  # type: ignore[no-untyped-def]
        kv, block_stride, v_offset = arguments[6], arguments[7], arguments[8]
        token_stride, head_stride, block_size = arguments[9], arguments[10], arguments[11]
        table = i32_at(arguments[12])
        num_queries, num_kv_heads, seq_len = arguments[13], arguments[14], arguments[15]
        scale = np.float32(bits_to_f64(arguments[16]))
        me = thread_number(arguments)
        q = f32_at(arguments[17] + me * arguments[18] * 4)
        p = f32_plus(q, most_rows * head_size)
        acc = f32_plus(p, most_rows * PIECE)
        best = f32_plus(acc, most_rows * head_size)
        all_acc = f32_plus(best, most_rows * 2)
        all_best = f32_plus(all_acc, most_rows * head_size)
        window = arguments[19] if bent else np.int64(0)
        softcap = np.float32(bits_to_f64(arguments[20])) if bent else np.float32(0)
        num_tiles = (num_queries + most_queries - 1) // most_queries
        for item in range(me, num_tiles * num_kv_heads, arguments[1]):
            h = item % num_kv_heads
            first = item // num_kv_heads * most_queries
            queries = min(most_queries, num_queries - first)
            rows = queries * group
            for t in range(queries):
                at = (first + t) * arguments[3] + h * group * head_size
                row = elements(arguments[2], at, bf16)
                for i in range(group * head_size):
                    q[t * group * head_size + i] = load(row, i) * scale
            position = seq_len - num_queries + first
            for row in range(rows):
                all_best[2 * row + 1] = np.float32(0)
            earliest = max(0, position + 1 - window) // PIECE * PIECE if window > 0 else np.int64(0)
            for start in range(earliest, position + queries, PIECE):
                count = min(PIECE, position + queries - start)
                for i in range(rows * head_size):
                    acc[i] = np.float32(0)
                for row in range(rows):
                    best[2 * row], best[2 * row + 1] = LOWEST, np.float32(0)
                for phase in range(2):
                    if phase == 1:
                        visible = position + 1 - start
                        if bent:
                            slopes = arguments[21]
                            if slopes != 0:
                                slopes += h * group * 4
                            bend_rows(p, rows, group, visible, count, window, softcap, slopes)
                        absorb_rows(acc, best, p, rows, group, visible, count, window, head_size)
                    for b in range(0, count, block_size):
                        block_id = np.int64(table[(start + b) // block_size])
                        at = block_id * block_stride + h * head_stride + phase * v_offset
                        tokens = min(block_size, count - b)
                        p_b = f32_plus(p, b)
                        block = elements(kv, at, bf16)
                        if phase == 0:
                            scores(
                                q, rows, block, token_stride, tokens, p_b, PIECE, head_size, None
                            )
                        else:
                            add_values(
                                acc, rows, block, token_stride, tokens, p_b, PIECE, head_size, None
                            )
                merge_rows(
                    all_acc,
                    all_best,
                    acc,
                    best,
                    rows,
                    group,
                    position + 1 - start,
                    count,
                    window,
                    head_size,
                )
            for row in range(rows):
                t, g = first + row // group, h * group + row % group
                out = elements(arguments[4], t * arguments[5] + g * head_size, bf16)
                finish(out, f32_plus(all_acc, row * head_size), all_best[2 * row + 1], head_size)

    return kernel(paged_prefill)
