"""Chunks of many sequences against the oracle, and that cutting them changes nothing."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from compute.kernels import AttentionOptions
from compute.kernels.triton.paged_prefill import paged_prefill
from tests.unit.compute.triton.support import (
    CANARY,
    E4M3,
    ORACLE,
    Paged,
    assert_guards_stand,
    assert_same_bits,
    guarded,
    randn,
    tolerance,
)
from tests.unit.compute.triton.test_paged_decode import BENT, on

# head size, block size, group, dtype, KV dtype, options: every value beside most others
GRID = [
    (64, 8, 1, torch.float32, None, "plain"),
    (80, 16, 3, torch.float16, None, "window"),
    (96, 32, 4, torch.bfloat16, None, "slopes"),
    (128, 16, 8, torch.float16, E4M3, "plain"),
    (256, 8, 2, torch.float32, None, "all"),
    (64, 32, 5, torch.bfloat16, torch.int8, "cap"),
    (80, 8, 17, torch.float32, E4M3, "window"),
    (96, 16, 1, torch.float16, torch.int8, "all"),
    (128, 32, 2, torch.bfloat16, E4M3, "window"),
    (256, 16, 1, torch.float16, None, "slopes"),
]


@pytest.fixture
def products_by_row(monkeypatch):
    """The interpreter's matrix products are BLAS's, which sums rows of a matrix differently
    by where they are. Tensor cores do not, and neither does this."""

    def matmul(a, b, dtype):
        return np.einsum("mk,kn->mn", a.astype(dtype), b.astype(dtype))

    monkeypatch.setattr(np, "matmul", matmul)


def first_rows_of(chunks: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(chunks).cumsum(0).tolist()], dtype=torch.int32)


def check(device, chunks, lengths, head_size, block_size, group, dtype, kv_dtype, bend):
    kv_heads = 2
    paged = Paged(
        lengths,
        head_size=head_size,
        block_size=block_size,
        num_kv_heads=kv_heads,
        dtype=kv_dtype or dtype,
    )
    num_tokens = sum(chunks)
    wide = randn(num_tokens, kv_heads * (group + 2), head_size, dtype=dtype).to(device)
    q = wide[:, : kv_heads * group]
    there, wide_before = paged.to(device), wide.clone()
    pool_before = there.pool.clone()
    whole, out = guarded(tuple(q.shape), dtype, device)
    options = BENT[bend](kv_heads * group)
    rows = first_rows_of(chunks)
    paged_prefill(
        q,
        there.kv,
        there.tables,
        rows.to(device),
        there.seq_lens,
        0.2,
        out,
        on(device, options),
        there.scales,
    )
    expected = torch.empty(q.shape, dtype=dtype)
    ORACLE.paged_prefill(
        q.cpu(),
        paged.kv,
        paged.tables,
        rows,
        paged.seq_lens,
        0.2,
        expected,
        options,
        paged.scales,
    )
    torch.testing.assert_close(out.cpu(), expected, **tolerance(dtype))
    assert_guards_stand(whole)
    assert_same_bits(wide, wide_before)
    assert_same_bits(there.pool, pool_before)


@pytest.mark.parametrize("case", GRID, ids=str)
def test_prefill_equals_the_oracle(device, case):
    check(device, [1, 9, 21], [1, 40, 85], *case)


@pytest.mark.parametrize(
    ("chunks", "lengths"),
    [
        ([2], [2]),
        ([130], [130]),  # more than one tile of queries
        ([64, 64], [64, 128]),  # tiles that end where chunks do
        ([1, 1, 1, 1, 1], [1, 64, 65, 128, 129]),
        ([3, 150, 1, 7], [3, 200, 77, 7]),
    ],
)
@pytest.mark.parametrize("bend", ["plain", "window"])
def test_prefill_equals_the_oracle_at_the_ends_of_tiles(device, chunks, lengths, bend):
    check(device, chunks, lengths, 32, 16, 2, torch.float32, None, bend)


def test_groups_too_large_for_one_program(device):
    check(device, [5, 9], [19, 9], 16, 8, 40, torch.float32, None, "slopes")


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float32, None), (torch.float16, E4M3), (torch.float16, None)],
    ids=str,
)
@pytest.mark.parametrize("window", [0, 50])
def test_a_token_has_the_same_bits_however_its_prompt_is_cut(
    device, dtype, kv_dtype, window, products_by_row
):
    length, cuts = 200, [0, 1, 47, 48, 130, 200]
    paged = Paged([length], head_size=64, dtype=kv_dtype or dtype).to(device)
    q = randn(length, 6, 64, dtype=dtype).to(device)
    whole, parts = torch.empty_like(q), torch.empty_like(q)
    tail = (AttentionOptions(window=window), paged.scales)
    rows = first_rows_of([length]).to(device)
    paged_prefill(q, paged.kv, paged.tables, rows, paged.seq_lens, 0.2, whole, *tail)
    for start, end in pairwise(cuts):
        paged_prefill(
            q[start:end],
            paged.kv,
            paged.tables,
            first_rows_of([end - start]).to(device),
            torch.tensor([end], dtype=torch.int32, device=device),
            0.2,
            parts[start:end],
            *tail,
        )
    assert_same_bits(whole, parts)


def test_a_chunk_has_the_same_bits_beside_others(device):
    paged = Paged([90, 33, 70], head_size=64).to(device)
    chunks = [40, 33, 5]
    q = randn(78, 4, 64).to(device)
    together, alone = torch.empty_like(q), torch.empty_like(q)
    rows = first_rows_of(chunks)
    there = rows.to(device)
    paged_prefill(q, paged.kv, paged.tables, there, paged.seq_lens, 0.2, together)
    for c, chunk in enumerate(chunks):
        part, one = slice(int(rows[c]), int(rows[c + 1])), slice(c, c + 1)
        paged_prefill(
            q[part],
            paged.kv,
            paged.tables[one],
            first_rows_of([chunk]).to(device),
            paged.seq_lens[one],
            0.2,
            alone[part],
        )
    assert_same_bits(together, alone)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN
def test_broken_kv_spoils_only_its_own_sequence(device):
    paged = Paged([20, 20], head_size=64).to(device)
    paged.kv[paged.tables[1, 0], 0, 3] = math.nan
    q = randn(30, 6, 64).to(device)
    out = torch.empty_like(q)
    rows = first_rows_of([20, 10]).to(device)
    paged_prefill(q, paged.kv, paged.tables, rows, paged.seq_lens, 0.2, out)
    assert out[:20].isfinite().all()
    assert out[20:].isnan().all()


def test_no_chunks_and_empty_ones_are_no_error(device):
    paged = Paged([20, 20], head_size=64).to(device)
    q = randn(3, 4, 64).to(device)
    rows = torch.tensor([0, 0, 3], dtype=torch.int32, device=device)
    out, alone = torch.empty_like(q), torch.empty_like(q)
    paged_prefill(q, paged.kv, paged.tables, rows, paged.seq_lens, 0.2, out)
    second = (paged.tables[1:], rows[1:], paged.seq_lens[1:])
    paged_prefill(q, paged.kv, *second, 0.2, alone)
    assert_same_bits(out, alone)
    paged_prefill(q[:0], paged.kv, paged.tables[:0], rows[:1], paged.seq_lens[:0], 0.2, out[:0])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", lambda x: x[:, :5]),
        ("out", lambda x: x[1:]),
        ("kv", lambda x: x.half()),
        ("block_tables", lambda x: x.long()),
        ("block_tables", lambda x: x[:1]),
        ("first_rows", lambda x: x[:2]),
        ("first_rows", lambda x: x.long()),
        ("seq_lens", lambda x: x.long()),
    ],
)
def test_prefill_refuses_tensors_that_do_not_fit(device, name, change):
    paged = Paged([20, 5], head_size=64).to(device)
    out = torch.full((8, 6, 64), CANARY, device=device)
    given = {
        "q": randn(8, 6, 64).to(device),
        "kv": paged.kv,
        "block_tables": paged.tables,
        "first_rows": first_rows_of([3, 5]).to(device),
        "seq_lens": paged.seq_lens,
        "scale": 0.2,
        "out": out,
    }
    with pytest.raises(ValueError, match="need"):
        paged_prefill(**given | {name: change(given[name])})
    assert (out == CANARY).all()
