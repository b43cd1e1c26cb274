"""Chunks of several sequences against their paged KV, in one launch.

A program takes TOKENS tokens of one chunk and one KV head; a row of its tile is one
query head of one of those tokens, so that the head's keys and values are read once for
the whole group. Which chunk a program belongs to it finds by bisection: chunk c begins at
program first_rows[c] // TOKENS + c, an upper bound of the tiles before it, and programs
beyond a chunk's last tile end at once.

A tile of KV wholly before the first row's position (and within the last one's window)
needs no masks: the loop over tiles is cut in three, masked only at the ends. For chunks
of hundreds of tokens the matrix products limit, for a few tokens memory does.

Tiles of KV lie at multiples of TILE of a sequence's own positions, and what a row does
not see adds nothing to it: a token's result has the same bits however its prompt was cut
into chunks and whatever else is in the launch. Decode sums in another order.

Sources: Dao 2023, arXiv:2307.08691; Kwon et al. 2023, arXiv:2309.06180; Agrawal et al.
2023, arXiv:2308.16369 (chunks).
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803, N806 (constants of a kernel are in capitals)

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

MAX_HEADS = 32  # of a group in one program


@triton.jit(do_not_specialize=["table_stride", "num_chunks"])
def prefill_kernel(
    # pointers
    q,
    kv,
    scales,
    tables,
    first_rows,
    seq_lens,
    slopes,
    out,
    # sizes
    num_chunks,
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
    TILE: tl.constexpr,
    STORAGE: tl.constexpr,
    OPERAND: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SLOPES: tl.constexpr,
):
    """Program (tile of a chunk's tokens, KV head and part of its group)."""
    TOKENS: tl.constexpr = ROWS // HEADS
    # The last tiles of a chunk see the most: they go first.
    tile_id = tl.num_programs(0) - 1 - tl.program_id(0)
    low = 0
    high = num_chunks
    while high - low > 1:
        middle = (low + high) // 2
        starts_at = tl.load(first_rows + middle) // TOKENS + middle
        low = tl.where(starts_at <= tile_id, middle, low)
        high = tl.where(starts_at <= tile_id, high, middle)
    chunk_row = tl.load(first_rows + low)
    end_row = tl.load(first_rows + low + 1)
    first_row = chunk_row + (tile_id - (chunk_row // TOKENS + low)) * TOKENS
    if first_row >= end_row:
        return

    parts: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head_id = tl.program_id(1) // parts
    first_head = tl.program_id(1) % parts * HEADS
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, HEAD_PAD)
    tokens = first_row + rows // HEADS
    heads = first_head + rows % HEADS
    is_row = (rows < TOKENS * HEADS) & (tokens < end_row) & (heads < GROUP)
    heads = kv_head_id * GROUP + heads
    is_cell = is_row[:, None] & (columns < HEAD)[None, :]
    cells = heads[:, None] * HEAD + columns[None, :]
    queries_at = q + tokens.to(tl.int64)[:, None] * q_token + cells
    queries = tl.load(queries_at, mask=is_cell, other=0.0).to(OPERAND)
    row_slope = tl.zeros([ROWS], tl.float32)
    if SLOPES:
        row_slope = tl.load(slopes + heads, mask=is_row, other=0.0)

    seq_len = tl.load(seq_lens + low)
    first_position = seq_len - end_row + first_row
    last_position = seq_len - end_row + tl.minimum(first_row + TOKENS, end_row) - 1
    # Rows that stand for no token see what the last one sees, and are not stored.
    row_position = tl.minimum(first_position + rows // HEADS, last_position)
    end = last_position + 1
    begin = 0
    whole_from = 0
    if WINDOW:
        begin = tl.maximum(first_position - window + 1, 0)
        whole_from = (tl.maximum(last_position - window + 1, 0) + TILE - 1) // TILE * TILE
    lowest = begin // TILE * TILE
    whole_to = tl.maximum((first_position + 1) // TILE * TILE, whole_from)
    whole_to = tl.minimum(whole_to, (end + TILE - 1) // TILE * TILE)

    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    kv_at = kv + kv_head_id.to(tl.int64) * kv_head
    scales_at = scales
    if STORAGE != "plain":
        scales_at = scales + kv_head_id.to(tl.int64) * scales_head
    table = tables + tl.cast(low, tl.int64) * table_stride
    # Masked up to where the last row's window begins, unmasked up to the first row's
    # position, masked to the end.
    FIRST_STAGE: tl.constexpr = 0 if WINDOW else 1
    for stage in tl.static_range(FIRST_STAGE, 3):
        if stage == 0:
            first_tile = lowest
            end_tile = tl.minimum(whole_from, whole_to)
        elif stage == 1:
            first_tile = whole_from
            end_tile = whole_to
        else:
            first_tile = whole_to
            end_tile = end
        for start in tl.range(first_tile, end_tile, TILE):
            most, total, acc = attend_tile(
                queries,
                row_position,
                row_slope,
                most,
                total,
                acc,
                kv_at,
                scales_at,
                table,
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
                stage != 1,
                WINDOW,
                SOFTCAP,
                SLOPES,
            )
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + tokens.to(tl.int64)[:, None] * out_token + cells, result, mask=is_cell)


def candidates(head_size: int, element_size: int, target: Target) -> list[tuple[int, int, Config]]:
    """(rows, tile, configuration) worth a try, the one to use untried first.

    The tile does not vary: it would change the order of sums.
    """
    if head_size <= 64:
        tile, tried = 64, [(128, 4, 3), (128, 8, 3), (64, 4, 3), (64, 4, 2)]
    elif head_size <= 128:
        tile, tried = 64, [(128, 8, 2), (128, 8, 3), (64, 4, 2), (64, 4, 3)]
    else:
        tile, tried = 32, [(64, 8, 2), (64, 4, 2), (32, 4, 2)]
    pad = power_of_two(head_size)
    fitting = [
        (rows, tile, Config(warps, stages))
        for rows, warps, stages in tried
        if (2 * stages * tile + rows) * pad * element_size <= target.shared_bytes - 8192
    ]
    return fitting or [(32, tile, Config(4, 1))]


def plan(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    first_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    options: AttentionOptions = PLAIN,
    scales: torch.Tensor | None = None,
    target: Target | None = None,
    choice: int = 0,
) -> list[Launch]:
    """The launch of Kernels.paged_prefill, whose docstring has the shapes.

    Raises ValueError for tensors that do not fit; what first_rows and seq_lens hold is not
    looked at, since they may lie on a device. Nothing runs.
    """
    target = target or target_of(q)
    shape = check_attention(q, kv, out, options, scales, target)
    num_tokens, num_q_heads, head_size = q.shape
    num_chunks = block_tables.shape[0]
    check_tables(block_tables, num_chunks)
    check_list("first_rows", first_rows, (num_chunks + 1,), torch.int32)
    check_list("seq_lens", seq_lens, (num_chunks,), torch.int32)
    check_same_device(q, block_tables=block_tables, first_rows=first_rows, seq_lens=seq_lens)
    group = num_q_heads // shape.num_kv_heads
    heads = min(group, MAX_HEADS)
    rows, tile, config = candidates(head_size, kv.element_size(), target)[choice]
    if num_chunks == 0:
        return []
    scales_strides = (0, 0, 0, 0) if scales is None else scales.stride()
    launch = Launch(
        prefill_kernel,
        (num_tokens // (rows // heads) + num_chunks, shape.num_kv_heads * pieces(group, heads)),
        {
            "q": q,
            "kv": raw(kv),
            "scales": q if scales is None else scales,
            "tables": block_tables,
            "first_rows": first_rows,
            "seq_lens": seq_lens,
            "slopes": q if options.slopes is None else options.slopes,
            "out": out,
            "num_chunks": num_chunks,
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
            "ROWS": rows,
            "HEAD": head_size,
            "HEAD_PAD": power_of_two(head_size),
            "BLOCK": shape.block_size,
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
    return [launch]


def paged_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    block_tables: torch.Tensor,
    first_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    options: AttentionOptions = PLAIN,
    scales: torch.Tensor | None = None,
    tuner: Tuner = FIRST,
) -> None:
    """Kernels.paged_prefill; a token's result has the same bits in chunks of any length.

    Raises ValueError for tensors that do not fit; then nothing has run.
    """
    arguments = (q, kv, block_tables, first_rows, seq_lens, scale, out, options, scales)
    tuner.run(
        ("paged_prefill", q.dtype, kv.dtype, q.shape[1:], kv.shape[2:], options.window > 0),
        lambda: len(candidates(q.shape[-1], kv.element_size(), target_of(q))),
        lambda choice: plan(*arguments, choice=choice),
    )
