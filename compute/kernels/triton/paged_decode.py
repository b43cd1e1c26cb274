"""One query token per sequence against its paged KV (flash-decoding).

A context is cut into pieces of PIECE tokens. A program takes one piece of one sequence
and one KV head, and reads that head's keys and values once for all query heads of its
group: they are the rows of one matrix product, padded to 16, the least that tensor cores
take. It is memory that limits: 16 rows cost 16 operations for a byte of fp16, where the
hardware has hundreds (docs/kernels.md), so plain sums would gain nothing for groups of 1.

Pieces lie at multiples of PIECE, and tiles at multiples of TILE, of a sequence's own
positions: how a result is summed depends on its sequence alone, never on the batch. A
context within one piece is written at once; of others a second kernel merges the pieces
in their order.

Programs of pieces past a sequence's end, or wholly before its window, end at once. Their
number follows from the width of the tables: pass no wider ones than the step needs.

Sources: Kwon et al. 2023, arXiv:2309.06180, section 4.3; Dao et al. 2023,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html; Ainslie et al. 2023,
arXiv:2305.13245 (groups of query heads).
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803 (constants of a kernel are in capitals)

import torch
import triton
import triton.language as tl

from compute.kernels import PLAIN, AttentionOptions
from compute.kernels.triton.attention import attend_tile
from compute.kernels.triton.checks import (
    check_attention,
    check_list,
    check_same_device,
    check_tables,
)
from compute.kernels.triton.elements import operand_of, raw
from compute.kernels.triton.launch import Config, Launch, Target, pieces, power_of_two, target_of
from compute.kernels.triton.tuning import FIRST, Tuner

PIECE = 256  # tokens: of 4k there are 16, and merging them moves 3 % of the bytes
MAX_HEADS = 64  # of a group in one program
_MERGED = 16  # pieces that the merge has in registers at a time


@triton.jit(do_not_specialize=["table_stride", "num_pieces"])
def decode_kernel(
    # pointers
    q,
    kv,
    scales,
    tables,
    seq_lens,
    slopes,
    out,
    partial,
    partial_lse,
    # sizes
    num_pieces,
    window,
    scale,
    softcap,
    # strides
    q_token,
    out_token,
    table_stride,
    kv_block,
    kv_part,
    kv_token,
    kv_head,
    scales_block,
    scales_part,
    scales_token,
    scales_head,
    # constants
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
    STORAGE: tl.constexpr,
    OPERAND: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SLOPES: tl.constexpr,
):
    """Program (n, KV head and part of its group, piece)."""
    n = tl.program_id(0).to(tl.int64)
    parts: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head_id = tl.program_id(1) // parts
    first_head = tl.program_id(1) % parts * HEADS
    num_q_heads = tl.num_programs(1) // parts * GROUP
    piece = tl.program_id(2)

    seq_len = tl.load(seq_lens + n)
    begin = 0
    if WINDOW:
        begin = tl.maximum(seq_len - window, 0)
    if (piece * PIECE >= seq_len) | ((piece + 1) * PIECE <= begin):
        return
    is_alone = (begin // PIECE) == ((seq_len - 1) // PIECE)
    begin = tl.maximum(begin, piece * PIECE)
    end = tl.minimum(seq_len, (piece + 1) * PIECE)

    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, HEAD_PAD)
    is_head = (rows < HEADS) & (first_head + rows < GROUP)
    heads = kv_head_id * GROUP + first_head + rows
    cells = heads[:, None] * HEAD + columns[None, :]
    is_cell = is_head[:, None] & (columns < HEAD)[None, :]
    queries = tl.load(q + n * q_token + cells, mask=is_cell, other=0.0).to(OPERAND)
    row_slope = tl.zeros([ROWS], tl.float32)
    if SLOPES:
        row_slope = tl.load(slopes + heads, mask=is_head, other=0.0)
    row_position = tl.zeros([ROWS], tl.int32) + (seq_len - 1)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    kv_at = kv + kv_head_id.to(tl.int64) * kv_head
    scales_at = scales
    if STORAGE != "plain":
        scales_at = scales + kv_head_id.to(tl.int64) * scales_head
    for start in tl.range(begin // TILE * TILE, end, TILE):
        most, total, acc = attend_tile(
            queries,
            row_position,
            row_slope,
            most,
            total,
            acc,
            kv_at,
            scales_at,
            tables + n * table_stride,
            start,
            begin,
            end,
            window,
            scale,
            softcap,
            kv_block,
            kv_part,
            kv_token,
            scales_block,
            scales_part,
            scales_token,
            HEAD,
            HEAD_PAD,
            BLOCK,
            TILE,
            STORAGE,
            OPERAND,
            True,
            WINDOW,
            SOFTCAP,
            SLOPES,
        )

    result = acc / total[:, None]
    if is_alone:
        tl.store(out + n * out_token + cells, result.to(out.dtype.element_ty), mask=is_cell)
    else:
        places = (n * num_q_heads + heads) * num_pieces + piece
        kept_at = partial + places[:, None] * HEAD + columns[None, :]
        tl.store(kept_at, result, mask=is_cell)
        tl.store(partial_lse + places, most + tl.log2(total), mask=is_head)


@triton.jit(do_not_specialize=["num_pieces"])
def merge_kernel(
    # pointers
    partial,
    partial_lse,
    seq_lens,
    out,
    # sizes
    num_pieces,
    window,
    # strides
    out_token,
    # constants
    HEAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PIECE: tl.constexpr,
    MERGED: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Program (n, query head): the pieces' results, weighted by their sums of weights."""
    n = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    num_q_heads = tl.num_programs(1)
    seq_len = tl.load(seq_lens + n)
    begin = 0
    if WINDOW:
        begin = tl.maximum(seq_len - window, 0)
    first = begin // PIECE
    last = (seq_len - 1) // PIECE
    if first == last:
        return
    columns = tl.arange(0, HEAD_PAD)
    is_column = columns < HEAD
    most = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([HEAD_PAD], tl.float32)
    for start in range(first // MERGED * MERGED, last + 1, MERGED):
        piece = start + tl.arange(0, MERGED)
        is_piece = (piece >= first) & (piece <= last)
        places = (n * num_q_heads + head) * num_pieces + piece
        lse = tl.load(partial_lse + places, mask=is_piece, other=float("-inf"))
        most_now = tl.maximum(most, tl.max(lse, axis=0))
        weights = tl.exp2(lse - most_now)
        shrink = tl.exp2(most - most_now)
        total = total * shrink + tl.sum(weights, axis=0)
        cells = places[:, None] * HEAD + columns[None, :]
        results = tl.load(partial + cells, mask=is_piece[:, None] & is_column[None, :], other=0.0)
        acc = acc * shrink + tl.sum(results * weights[:, None], axis=0)
        most = most_now
    result = (acc / total).to(out.dtype.element_ty)
    tl.store(out + n * out_token + head * HEAD + columns, result, mask=is_column)


def candidates(head_size: int, element_size: int, target: Target) -> list[tuple[int, Config]]:
    """Tiles and configurations worth a try, the one to use untried first.

    The tile does not vary: it would change the order of sums. Loads under way take
    shared memory, of which no candidate needs more than a program can have.
    """
    tile = 64 if head_size <= 128 else 32
    tried = [(4, 3), (4, 2), (2, 3), (8, 3), (4, 4)]
    stage_bytes = 2 * tile * power_of_two(head_size) * element_size
    fitting = [
        (tile, Config(warps, stages))
        for warps, stages in tried
        if stages * stage_bytes <= target.shared_bytes // 2  # two programs at a time
    ]
    return fitting or [(tile, Config(4, 1))]


def plan(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    options: AttentionOptions = PLAIN,
    scales: torch.Tensor | None = None,
    target: Target | None = None,
    choice: int = 0,
) -> list[Launch]:
    """The launches of Kernels.paged_decode, whose docstring has the shapes.

    Raises ValueError for tensors that do not fit. Nothing runs.
    """
    target = target or target_of(q)
    shape = check_attention(q, kv, out, options, scales, target)
    num_sequences, num_q_heads, head_size = q.shape
    check_list("seq_lens", seq_lens, (num_sequences,), torch.int32)
    check_tables(block_tables, num_sequences)
    check_same_device(q, block_tables=block_tables, seq_lens=seq_lens)
    group = num_q_heads // shape.num_kv_heads
    heads = min(group, MAX_HEADS)
    num_pieces = max(1, pieces(block_tables.shape[1] * shape.block_size, PIECE))
    partial = torch.empty(
        (num_sequences, num_q_heads, num_pieces, head_size) if num_pieces > 1 else (1,),
        dtype=torch.float32,
        device=q.device,
    )
    partial_lse = torch.empty(
        (num_sequences, num_q_heads, num_pieces) if num_pieces > 1 else (1,),
        dtype=torch.float32,
        device=q.device,
    )
    tile, config = candidates(head_size, kv.element_size(), target)[choice]
    scales_strides = (0, 0, 0, 0) if scales is None else scales.stride()
    attend = Launch(
        decode_kernel,
        (num_sequences, shape.num_kv_heads * pieces(group, heads), num_pieces),
        {
            "q": q,
            "kv": raw(kv),
            "scales": q if scales is None else scales,
            "tables": block_tables,
            "seq_lens": seq_lens,
            "slopes": q if options.slopes is None else options.slopes,
            "out": out,
            "partial": partial,
            "partial_lse": partial_lse,
            "num_pieces": num_pieces,
            "window": options.window,
            "scale": scale,
            "softcap": options.softcap,
            "q_token": q.stride(0),
            "out_token": out.stride(0),
            "table_stride": block_tables.stride(0),
            "kv_block": kv.stride(0),
            "kv_part": kv.stride(1),
            "kv_token": kv.stride(2),
            "kv_head": kv.stride(3),
            "scales_block": scales_strides[0],
            "scales_part": scales_strides[1],
            "scales_token": scales_strides[2],
            "scales_head": scales_strides[3],
            "GROUP": group,
            "HEADS": heads,
            "ROWS": max(16, power_of_two(heads)),
            "HEAD": head_size,
            "HEAD_PAD": power_of_two(head_size),
            "BLOCK": shape.block_size,
            "PIECE": PIECE,
            "TILE": tile,
            "STORAGE": shape.storage,
            "OPERAND": operand_of(q.dtype, target),
            "WINDOW": options.window > 0,
            "SOFTCAP": options.softcap > 0,
            "SLOPES": options.slopes is not None,
        },
        config,
        2 * tile * head_size * kv.element_size(),
    )
    if num_pieces == 1:
        return [attend]
    merge = Launch(
        merge_kernel,
        (num_sequences, num_q_heads),
        {
            "partial": partial,
            "partial_lse": partial_lse,
            "seq_lens": seq_lens,
            "out": out,
            "num_pieces": num_pieces,
            "window": options.window,
            "out_token": out.stride(0),
            "HEAD": head_size,
            "HEAD_PAD": power_of_two(head_size),
            "PIECE": PIECE,
            "MERGED": _MERGED,
            "WINDOW": options.window > 0,
        },
        Config(4),
        _MERGED * head_size * 4,
    )
    return [attend, merge]


def paged_decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    options: AttentionOptions = PLAIN,
    scales: torch.Tensor | None = None,
    tuner: Tuner = FIRST,
) -> None:
    """Kernels.paged_decode; results have the same bits alone and in any batch.

    Raises ValueError for tensors that do not fit; then nothing has run.
    """
    arguments = (q, kv, block_tables, seq_lens, scale, out, options, scales)
    tuner.run(
        ("paged_decode", q.dtype, kv.dtype, q.shape[1:], kv.shape[2:], options.window > 0),
        lambda: len(candidates(q.shape[-1], kv.element_size(), target_of(q))),
        lambda choice: plan(*arguments, choice=choice),
    )
