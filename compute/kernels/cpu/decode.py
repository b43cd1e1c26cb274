"""One query token per sequence against its paged keys and values.

A sequence's context is cut into pieces of PIECE tokens; each is attended to with a
softmax of its own, and the pieces of a sequence are merged at the end (the way of
flash-decoding). So one long sequence keeps all threads busy, and, since pieces depend
on the length alone, the result does not depend on the rest of the batch nor on the
number of threads.

Within a piece all keys are read once, front to back, for all heads, then all values.

Sources: Kwon et al. 2023, arXiv:2309.06180, section 4.3; Milakov and Gimelshein 2018,
arXiv:1805.02867; Dao et al. 2023, https://crfm.stanford.edu/2023/10/12/flashdecoding.html.
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


def partial_floats(num_pieces: int, num_q_heads: int, head_size: int) -> int:
    """Room for the results of all pieces: an accumulator, a maximum and a sum each."""
    return num_pieces * num_q_heads * (head_size + 2)


def scratch_floats(num_q_heads: int, head_size: int) -> int:
    """Room per thread: scores of a piece, and a token's queries in fp32."""
    return num_q_heads * (PIECE + head_size)


@helper
def first_piece(seq_len, window):  # type: ignore[no-untyped-def]
    """The first piece of which the last token sees something; a window of 0 is none."""
    if window == 0 or window >= seq_len:
        return np.int64(0)
    return np.int64(seq_len - window) // PIECE


@functools.cache
def paged_decode_kernel(head_size: int, group: int, bf16: bool, bent: bool) -> Any:
    """The whole of Kernels.paged_decode; `bent`: with options.

    Arguments: team (2); q, its row stride; out, stride; kv, strides of its first four
    axes, B; block_tables, stride; seq_lens; N; Hkv; scale (double); partial results; most
    pieces a sequence can have; scratch, its floats per thread; window; softcap (double);
    slopes or 0.
    """

    def paged_decode(arguments):  # type: ignore[no-untyped-def]
        me = thread_number(arguments)
        kv, block_stride, v_offset = arguments[6], arguments[7], arguments[8]
        token_stride, head_stride, block_size = arguments[9], arguments[10], arguments[11]
        seq_lens = i32_at(arguments[14])
        num_sequences, num_kv_heads = arguments[15], arguments[16]
        scale = np.float32(bits_to_f64(arguments[17]))
        num_heads = num_kv_heads * group
        partial_size = num_heads * (head_size + 2)
        scratch = arguments[20] + me * arguments[21] * 4
        p, q = f32_at(scratch), f32_at(scratch + num_heads * PIECE * 4)
        window = arguments[22] if bent else np.int64(0)
        softcap = np.float32(bits_to_f64(arguments[23])) if bent else np.float32(0)
        total = np.int64(0)
        for n in range(num_sequences):
            total += seq_lens[n]
        # A piece is run by the thread in whose share of all tokens it starts.
        first = me * total // arguments[1]
        last = (me + 1) * total // arguments[1]
        at = np.int64(0)
        for n in range(num_sequences):
            table = i32_at(arguments[12] + n * arguments[13] * 4)
            row = elements(arguments[2], n * arguments[3], bf16)
            for start in range(0, seq_lens[n], PIECE):
                stop = min(start + PIECE, seq_lens[n])
                mine = first <= at < last and start // PIECE >= first_piece(seq_lens[n], window)
                at += stop - start
                if not mine:
                    continue
                slot = (n * arguments[19] + start // PIECE) * partial_size
                acc = f32_at(arguments[18] + slot * 4)
                best = f32_plus(acc, num_heads * head_size)
                for i in range(num_heads * head_size):
                    acc[i] = np.float32(0)
                for h in range(num_heads):
                    best[2 * h], best[2 * h + 1] = LOWEST, np.float32(0)
                for i in range(num_heads * head_size):
                    q[i] = load(row, i) * scale
                for phase in range(2):
                    if phase == 1:
                        for h in range(num_heads):
                            if bent:
                                hidden = seq_lens[n] - window - start if window > 0 else np.int64(0)
                                slope = np.float32(0)
                                if arguments[24] != 0:
                                    slope = f32_at(arguments[24])[h]
                                bend(
                                    f32_plus(p, h * PIECE),
                                    stop - start,
                                    hidden,
                                    start - (seq_lens[n] - 1),
                                    softcap,
                                    slope,
                                )
                            absorb(
                                f32_plus(acc, h * head_size),
                                f32_plus(best, 2 * h),
                                f32_plus(p, h * PIECE),
                                stop - start,
                                head_size,
                            )
                    for b in range(start, stop, block_size):
                        block = np.int64(table[b // block_size]) * block_stride
                        count = min(block_size, stop - b)
                        # The next block may lie anywhere, so nobody else can fetch it ahead.
                        following = table[b // block_size]
                        if b + block_size < seq_lens[n]:
                            following = table[b // block_size + 1]
                        elif n + 1 < num_sequences:
                            following = i32_at(arguments[12] + (n + 1) * arguments[13] * 4)[0]
                        ahead = np.int64(following) * block_stride - block
                        for h in range(num_kv_heads):
                            at_h = block + h * head_stride + phase * v_offset
                            kv_h = elements(kv, at_h, bf16)
                            next_h = elements(kv, at_h + ahead, bf16)
                            p_h = f32_plus(p, h * group * PIECE + b - start)
                            first_row = h * group * head_size
                            if phase == 0:
                                rows = f32_plus(q, first_row)
                                scores(
                                    rows,
                                    group,
                                    kv_h,
                                    token_stride,
                                    count,
                                    p_h,
                                    PIECE,
                                    head_size,
                                    next_h,
                                )
                            else:
                                rows = f32_plus(acc, first_row)
                                add_values(
                                    rows,
                                    group,
                                    kv_h,
                                    token_stride,
                                    count,
                                    p_h,
                                    PIECE,
                                    head_size,
                                    next_h,
                                )
                if (seq_lens[n] - 1) // PIECE > first_piece(seq_lens[n], window):
                    continue  # left to the merge
                for i in range(num_heads):
                    out = elements(arguments[4], n * arguments[5] + i * head_size, bf16)
                    finish(out, f32_plus(acc, i * head_size), best[2 * i + 1], head_size)

    return kernel(paged_decode)


@functools.cache
def merge_kernel(head_size: int, bf16: bool) -> Any:
    """out of the sequences that have several pieces.

    Arguments: team (2); out, its row stride; seq_lens; N; Hq; partial results; most
    pieces a sequence can have; window.
    """

    def merge(arguments):  # type: ignore[no-untyped-def]
        me = thread_number(arguments)
        seq_lens = i32_at(arguments[4])
        num_heads = arguments[6]
        partial_size = num_heads * (head_size + 2)
        for n in range(me, arguments[5], arguments[1]):
            start = first_piece(seq_lens[n], arguments[9])
            num_pieces = (seq_lens[n] + PIECE - 1) // PIECE - start
            if num_pieces == 1:
                continue
            slot = n * arguments[8] + start
            first = f32_at(arguments[7] + slot * partial_size * 4)
            for h in range(num_heads):
                acc = f32_plus(first, h * head_size)
                best = f32_plus(first, num_heads * head_size + 2 * h)
                for piece in range(1, num_pieces):
                    other = f32_plus(acc, piece * partial_size)
                    theirs = f32_plus(best, piece * partial_size)
                    merge_into(acc, best, other, theirs, head_size)
                out = elements(arguments[2], n * arguments[3] + h * head_size, bf16)
                finish(out, acc, best[1], head_size)

    return kernel(merge)
