"""Whole blocks copied within a pool, many pairs in one launch.

A program copies TILE words of 8 bytes of one pair: bytes are bytes, so no dtype matters.
Pairs of a launch run in any order. So the list is cut into waves, one launch each, such
that no pair of a wave reads or writes what another one of it writes: then the result is
that of one copy after the other. A block's copy onto a fresh one, which is nearly all
there is, never needs a second wave.

What limits is memory: a byte is read and written once.
"""
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803 (constants of a kernel are in capitals)

import torch
import triton
import triton.language as tl

from compute.kernels.triton.launch import Config, Launch, pieces
from compute.kernels.triton.tuning import run_all

TILE = 4096  # words of a program: 32 KiB, 256 bytes for each of 128 threads


@triton.jit
def move_kernel(
    # pointers
    source,
    target,
    source_ids,
    target_ids,
    # sizes
    num_words,
    # strides
    source_block,
    target_block,
    # constants
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    FROM_LIST: tl.constexpr,
    TO_LIST: tl.constexpr,
):
    """Program (pair, tile of its words). A side without a list has the blocks in order."""
    pair = tl.program_id(0).to(tl.int64)
    from_id = pair
    to_id = pair
    if FROM_LIST:
        from_id = tl.load(source_ids + pair)
    if TO_LIST:
        to_id = tl.load(target_ids + pair)
    first = tl.program_id(1).to(tl.int64) * TILE
    for start in tl.static_range(0, TILE, STEP):
        words = first + start + tl.arange(0, STEP)
        is_word = words < num_words
        moved = tl.load(source + from_id * source_block + words, mask=is_word, other=0)
        tl.store(target + to_id * target_block + words, moved, mask=is_word)


def as_words(name: str, x: torch.Tensor) -> torch.Tensor:
    """[P, ...] with dense blocks as [P, words], words of 8 bytes or, if those do not fit, 1.

    Raises ValueError if a block is not dense.
    """
    if x.dim() < 2 or (x.numel() and not x[0].is_contiguous()):
        raise ValueError(f"{name} {tuple(x.shape)}: need [P, ...] with dense blocks")
    flat = torch.as_strided(x, (x.shape[0], x[0].numel()), (x.stride(0), 1), x.storage_offset())
    in_bytes = flat.view(torch.uint8)
    sizes = (in_bytes.shape[1], in_bytes.stride(0), in_bytes.storage_offset())
    if any(size % 8 for size in sizes):
        return in_bytes
    return in_bytes.view(torch.int64)


def move(
    source: torch.Tensor,
    target: torch.Tensor,
    source_ids: torch.Tensor | None,
    target_ids: torch.Tensor | None,
    num_pairs: int,
) -> Launch:
    """source, target: [P, words] of as_words, of words of the same size."""
    num_words = source.shape[1]
    return Launch(
        move_kernel,
        (num_pairs, pieces(num_words, TILE)),
        {
            "source": source,
            "target": target,
            "source_ids": source if source_ids is None else source_ids,
            "target_ids": target if target_ids is None else target_ids,
            "num_words": num_words,
            "source_block": source.stride(0),
            "target_block": target.stride(0),
            "TILE": TILE,
            "STEP": 1024,
            "FROM_LIST": source_ids is not None,
            "TO_LIST": target_ids is not None,
        },
        Config(4),
        2 * min(TILE, num_words) * source.element_size(),
    )


def waves(pairs: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The pairs, cut so that those of a wave may run in any order."""
    cut: list[list[tuple[int, int]]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, target in pairs:
        if source == target:
            continue
        if not cut or source in written or target in written or target in read:
            cut.append([])
            read, written = set(), set()
        cut[-1].append((source, target))
        read.add(source)
        written.add(target)
    return cut


def plan(pool: torch.Tensor, pairs: list[tuple[int, int]]) -> list[Launch]:
    """The launches of Kernels.copy_blocks.

    Raises ValueError for blocks that are not dense, or that the pool has not. Nothing runs.
    """
    num_blocks = pool.shape[0]
    words = as_words("pool", pool)
    for source, target in pairs:
        if not (0 <= source < num_blocks and 0 <= target < num_blocks):
            raise ValueError(f"copy {source} to {target}: need blocks of 0 to {num_blocks - 1}")
    cut = waves(pairs)
    # One transfer for all waves: a row of sources and one of targets.
    ids = torch.tensor(
        [[pair[side] for wave in cut for pair in wave] for side in range(2)], dtype=torch.int64
    ).to(pool.device, non_blocking=True)
    launches, start = [], 0
    for wave in cut:
        part = slice(start, start + len(wave))
        launches.append(move(words, words, ids[0, part], ids[1, part], len(wave)))
        start += len(wave)
    return launches


def copy_blocks(pool: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    """Kernels.copy_blocks. Raises ValueError for what does not fit; then nothing has run."""
    run_all(plan(pool, pairs))
