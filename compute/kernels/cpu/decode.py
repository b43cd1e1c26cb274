"""One query token per sequence against its paged keys and values.

A sequence's context is cut into pieces of PIECE tokens; each is attended to with an
online softmax of its own, and the pieces of a sequence are merged at the end (the way
of flash-decoding). So one long sequence keeps all threads busy, and, since pieces depend
on the length alone, the result does not depend on the rest of the batch nor on the
number of threads.

Within a piece each block is read once, front to back, for all heads: keys for the scores,
then values. Eight tokens are taken at a time: their scores are eight independent sums,
and one pass over the accumulator adds eight values.

Sources: Kwon et al. 2023, arXiv:2309.06180, section 4.3; Milakov and Gimelshein 2018,
arXiv:1805.02867; Dao et al. 2023, https://crfm.stanford.edu/2023/10/12/flashdecoding.html.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from compute.kernels.cpu.jit import (
    bf16_at,
    bits_to_f64,
    exp_below_one,
    f32_at,
    f32_plus,
    helper,
    i32_at,
    kernel,
    load,
    store,
    thread_number,
)

PIECE = 256
_LOWEST = np.float32(-3.4e38)


def partial_floats(num_pieces: int, num_q_heads: int, head_size: int) -> int:
    """Room for the results of all pieces: an accumulator, a maximum and a sum each."""
    return num_pieces * num_q_heads * (head_size + 2)


def scratch_floats(block_size: int, num_q_heads: int, head_size: int) -> int:
    """Room per thread: the weights of a block, queries, keys and values of a block in fp32."""
    return block_size + num_q_heads * head_size + 2 * block_size * head_size


@helper
def dot8(q, k, stride, size, scale, scores):  # type: ignore[no-untyped-def]
    """scores[0:8] = scale * q · k[j], rows of k `stride` apart."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = np.float32(0)
    for d in range(size):
        x = q[d]
        s0 += x * k[d]
        s1 += x * k[stride + d]
        s2 += x * k[2 * stride + d]
        s3 += x * k[3 * stride + d]
        s4 += x * k[4 * stride + d]
        s5 += x * k[5 * stride + d]
        s6 += x * k[6 * stride + d]
        s7 += x * k[7 * stride + d]
    scores[0], scores[1], scores[2], scores[3] = s0 * scale, s1 * scale, s2 * scale, s3 * scale
    scores[4], scores[5], scores[6], scores[7] = s4 * scale, s5 * scale, s6 * scale, s7 * scale


@helper
def add8(out, v, stride, size, p):  # type: ignore[no-untyped-def]
    """out += sum over j < 8 of p[j] * v[j]."""
    p0, p1, p2, p3, p4, p5, p6, p7 = p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7]
    for d in range(size):
        low = p0 * v[d] + p1 * v[stride + d] + p2 * v[2 * stride + d] + p3 * v[3 * stride + d]
        high = (
            p4 * v[4 * stride + d]
            + p5 * v[5 * stride + d]
            + p6 * v[6 * stride + d]
            + p7 * v[7 * stride + d]
        )
        out[d] += low + high


@helper
def dot1(q, k, size, scale):  # type: ignore[no-untyped-def]
    s = np.float32(0)
    for d in range(size):
        s += q[d] * k[d]
    return s * scale


@helper
def add1(out, v, size, p):  # type: ignore[no-untyped-def]
    for d in range(size):
        out[d] += p * v[d]


@helper
def widened(source, stride, num_rows, size, target):  # type: ignore[no-untyped-def]
    """Rows of bf16 as a dense fp32 tile."""
    for b in range(num_rows):
        for d in range(size):
            target[b * size + d] = load(source, b * stride + d)


@helper
def absorb(q, k, k_stride, v, v_stride, num_tokens, size, scale, acc, best, p):  # type: ignore[no-untyped-def]
    """One head takes in `num_tokens` more tokens: online softmax over acc [D], best = (max, sum)."""
    whole = num_tokens // 8 * 8
    for b in range(0, whole, 8):
        dot8(q, f32_plus(k, b * k_stride), k_stride, size, scale, f32_plus(p, b))
    for b in range(whole, num_tokens):
        p[b] = dot1(q, f32_plus(k, b * k_stride), size, scale)
    highest = best[0]
    for b in range(num_tokens):
        highest = max(highest, p[b])
    if highest > best[0]:
        factor = exp_below_one(best[0] - highest)
        for d in range(size):
            acc[d] *= factor
        best[0] = highest
        best[1] *= factor
    total = np.float32(0)
    for b in range(num_tokens):
        p[b] = exp_below_one(p[b] - highest)
        total += p[b]
    best[1] += total
    for b in range(0, whole, 8):
        add8(acc, f32_plus(v, b * v_stride), v_stride, size, f32_plus(p, b))
    for b in range(whole, num_tokens):
        add1(acc, f32_plus(v, b * v_stride), size, p[b])


@functools.cache
def paged_decode_kernel(head_size: int, group: int, block_size: int, bf16: bool) -> Any:
    """The whole of Kernels.paged_decode.

    Arguments: team (2); q, its row stride; out, stride; kv, strides of its first four
    axes; block_tables, stride; seq_lens; N; Hkv; scale (double); partial results; most
    pieces a sequence can have; scratch, its floats per thread.
    """
    element = 2 if bf16 else 4

    def paged_decode(arguments):  # type: ignore[no-untyped-def]
        me = thread_number(arguments)
        kv, block_stride, v_offset = arguments[6], arguments[7], arguments[8]
        token_stride, head_stride = arguments[9], arguments[10]
        seq_lens = i32_at(arguments[13])
        num_sequences, num_kv_heads = arguments[14], arguments[15]
        scale = np.float32(bits_to_f64(arguments[16]))
        num_heads = num_kv_heads * group
        partial_size = num_heads * (head_size + 2)
        scratch = arguments[19] + me * arguments[20] * 4
        p, q32 = f32_at(scratch), f32_at(scratch + block_size * 4)
        k32 = f32_at(scratch + (block_size + num_heads * head_size) * 4)
        v32 = f32_plus(k32, block_size * head_size)
        total = np.int64(0)
        for n in range(num_sequences):
            total += seq_lens[n]
        # A piece is run by the thread in whose share of all tokens it starts.
        first = me * total // arguments[1]
        last = (me + 1) * total // arguments[1]
        at = np.int64(0)
        for n in range(num_sequences):
            table = i32_at(arguments[11] + n * arguments[12] * 4)
            q_at = arguments[2] + n * arguments[3] * element
            for start in range(0, seq_lens[n], PIECE):
                stop = min(start + PIECE, seq_lens[n])
                mine = first <= at < last
                at += stop - start
                if not mine:
                    continue
                slot = (n * arguments[18] + start // PIECE) * partial_size
                acc = f32_at(arguments[17] + slot * 4)
                best = f32_plus(acc, num_heads * head_size)
                for i in range(num_heads * head_size):
                    acc[i] = np.float32(0)
                for h in range(num_heads):
                    best[2 * h], best[2 * h + 1] = _LOWEST, np.float32(0)
                if bf16:
                    widened(bf16_at(q_at), 0, 1, num_heads * head_size, q32)
                    q = q32
                else:
                    q = f32_at(q_at)
                for b in range(start, stop, block_size):
                    block = kv + np.int64(table[b // block_size]) * block_stride * element
                    count = min(block_size, stop - b)
                    for h in range(num_kv_heads):
                        k_at = block + h * head_stride * element
                        v_at = k_at + v_offset * element
                        if bf16:
                            widened(bf16_at(k_at), token_stride, count, head_size, k32)
                            widened(bf16_at(v_at), token_stride, count, head_size, v32)
                            k, v, stride = k32, v32, head_size
                        else:
                            k, v, stride = f32_at(k_at), f32_at(v_at), token_stride
                        for g in range(h * group, (h + 1) * group):
                            absorb(
                                f32_plus(q, g * head_size),
                                k,
                                stride,
                                v,
                                stride,
                                count,
                                head_size,
                                scale,
                                f32_plus(acc, g * head_size),
                                f32_plus(best, 2 * g),
                                p,
                            )

    return kernel(paged_decode)


@functools.cache
def merge_kernel(head_size: int, bf16: bool) -> Any:
    """out = the pieces of each sequence, weighted by their sums.

    Arguments: team (2); out, its row stride; seq_lens; N; Hq; partial results; most
    pieces a sequence can have.
    """

    def merge(arguments):  # type: ignore[no-untyped-def]
        me = thread_number(arguments)
        seq_lens = i32_at(arguments[4])
        num_heads = arguments[6]
        partial_size = num_heads * (head_size + 2)
        for n in range(me, arguments[5], arguments[1]):
            num_pieces = (seq_lens[n] + PIECE - 1) // PIECE
            acc = f32_at(arguments[7] + n * arguments[8] * partial_size * 4)
            for h in range(num_heads):
                if bf16:
                    out = bf16_at(arguments[2] + (n * arguments[3] + h * head_size) * 2)
                else:
                    out = f32_at(arguments[2] + (n * arguments[3] + h * head_size) * 4)
                into = f32_plus(acc, h * head_size)
                best = f32_plus(acc, num_heads * head_size + 2 * h)
                for piece in range(1, num_pieces):
                    other = f32_plus(into, piece * partial_size)
                    theirs = f32_plus(best, piece * partial_size)
                    highest = max(best[0], theirs[0])
                    ours_factor = exp_below_one(best[0] - highest)
                    their_factor = exp_below_one(theirs[0] - highest)
                    best[0] = highest
                    best[1] = best[1] * ours_factor + theirs[1] * their_factor
                    for d in range(head_size):
                        into[d] = into[d] * ours_factor + other[d] * their_factor
                for d in range(head_size):
                    store(out, d, into[d] / best[1])

    return kernel(merge)
