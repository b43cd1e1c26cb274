"""Decode against the oracle, what it must leave alone, and that company changes nothing."""

from __future__ import annotations

import math

import pytest
import torch

from compute.kernels import PLAIN, AttentionOptions
from compute.kernels.triton.paged_decode import PIECE, paged_decode
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

BENT = {
    "plain": lambda heads: PLAIN,
    "window": lambda heads: AttentionOptions(window=21),
    "wide": lambda heads: AttentionOptions(window=PIECE + 9),
    "cap": lambda heads: AttentionOptions(softcap=3.0),
    "slopes": lambda heads: AttentionOptions(slopes=torch.linspace(0.01, 0.3, heads)),
    "all": lambda heads: AttentionOptions(30, 3.0, torch.linspace(0.01, 0.3, heads)),
}
# head size, block size, group, dtype, KV dtype, options: every value beside most others
GRID = [
    (64, 8, 1, torch.float32, None, "plain"),
    (80, 16, 3, torch.float16, None, "window"),
    (96, 32, 4, torch.bfloat16, None, "slopes"),
    (128, 16, 8, torch.float16, E4M3, "plain"),
    (256, 8, 2, torch.float32, None, "all"),
    (64, 32, 5, torch.bfloat16, torch.int8, "cap"),
    (80, 8, 17, torch.float32, E4M3, "wide"),
    (96, 16, 1, torch.float16, torch.int8, "all"),
    (128, 32, 2, torch.bfloat16, E4M3, "window"),
    (256, 16, 1, torch.float16, None, "slopes"),
    (64, 16, 4, torch.float16, None, "wide"),
]


def on(device, options: AttentionOptions) -> AttentionOptions:
    slopes = None if options.slopes is None else options.slopes.to(device)
    return AttentionOptions(options.window, options.softcap, slopes)


def check(device, lengths, head_size, block_size, group, dtype, kv_dtype, bend):
    kv_heads = 2
    paged = Paged(
        lengths,
        head_size=head_size,
        block_size=block_size,
        num_kv_heads=kv_heads,
        dtype=kv_dtype or dtype,
    )
    # As in the decoder: queries are the head of wider rows.
    wide = randn(len(lengths), kv_heads * (group + 2), head_size, dtype=dtype).to(device)
    q = wide[:, : kv_heads * group]
    there = paged.to(device)
    before, pool_before, wide_before = there.kv.clone(), there.pool.clone(), wide.clone()
    whole, out = guarded(tuple(q.shape), dtype, device)
    options = BENT[bend](kv_heads * group)
    paged_decode(
        q,
        there.kv,
        there.tables,
        there.seq_lens,
        0.2,
        out,
        on(device, options),
        there.scales,
    )
    expected = torch.empty(q.shape, dtype=dtype)
    ORACLE.paged_decode(
        q.cpu(), paged.kv, paged.tables, paged.seq_lens, 0.2, expected, options, paged.scales
    )
    torch.testing.assert_close(out.cpu(), expected, **tolerance(dtype))
    assert_guards_stand(whole)
    assert_same_bits(wide, wide_before)
    assert_same_bits(there.pool, pool_before)
    assert_same_bits(there.kv, before)
    assert_same_bits(there.tables, paged.tables)


@pytest.mark.parametrize("case", GRID, ids=str)
def test_decode_equals_the_oracle(device, case):
    block_size = case[1]
    check(device, [1, block_size - 1, block_size + 1, 70, PIECE + 5], *case)


@pytest.mark.parametrize("length", [2, 16, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 3 * PIECE + 7])
def test_decode_equals_the_oracle_at_the_ends_of_tiles_and_pieces(device, length):
    check(device, [length], 64, 16, 2, torch.float32, None, "plain")


def test_more_pieces_than_the_merge_takes_at_once(device):
    check(device, [18 * PIECE + 3], 16, 32, 1, torch.float32, None, "plain")


def test_groups_too_large_for_one_program(device):
    check(device, [19, 33], 64, 16, 70, torch.float32, None, "slopes")


def test_sequences_that_share_blocks(device):
    paged = Paged([40, 40, 33], head_size=64)
    paged.tables[1, :2] = paged.tables[0, :2]
    paged.tables[2, :2] = paged.tables[0, :2]
    there = paged.to(device)
    q = randn(1, 6, 64).expand(3, -1, -1).contiguous()
    out, expected = torch.empty_like(q, device=device), torch.empty_like(q)
    paged_decode(q.to(device), there.kv, there.tables, there.seq_lens, 0.2, out)
    ORACLE.paged_decode(q, paged.kv, paged.tables, paged.seq_lens, 0.2, expected)
    torch.testing.assert_close(out.cpu(), expected, **tolerance(torch.float32))


@pytest.mark.parametrize("window", [0, 40, PIECE + 40])
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(device, window):
    paged = Paged([2 * PIECE + 30, 3, 129, 64], head_size=64, dtype=torch.float16).to(device)
    q = randn(4, 6, 64, dtype=torch.float16).to(device)
    together, alone = torch.empty_like(q), torch.empty_like(q)
    options = AttentionOptions(window=window)
    paged_decode(q, paged.kv, paged.tables, paged.seq_lens, 0.2, together, options)
    for n in range(4):
        row = slice(n, n + 1)
        used = -(-int(paged.seq_lens[n]) // 16)
        paged_decode(
            q[row],
            paged.kv,
            paged.tables[row, :used].contiguous(),
            paged.seq_lens[row],
            0.2,
            alone[row],
            options,
        )
    assert_same_bits(together, alone)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN
def test_broken_kv_spoils_only_its_own_sequence(device):
    paged = Paged([20, 20], head_size=64).to(device)
    paged.kv[paged.tables[1, 0], 0, 3] = math.nan
    q = randn(2, 6, 64).to(device)
    out = torch.empty_like(q)
    paged_decode(q, paged.kv, paged.tables, paged.seq_lens, 0.2, out)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


def test_what_lies_before_the_window_is_not_read(device):
    paged = Paged([100], head_size=64)
    options = AttentionOptions(window=50)
    q, expected = randn(1, 4, 64), torch.empty(1, 4, 64)
    ORACLE.paged_decode(q, paged.kv, paged.tables, paged.seq_lens, 0.2, expected, options)
    for slot in range(50):
        paged.kv[paged.tables[0, slot // 16], :, slot % 16] = math.nan
    there, out = paged.to(device), torch.empty(1, 4, 64, device=device)
    paged_decode(q.to(device), there.kv, there.tables, there.seq_lens, 0.2, out, options)
    torch.testing.assert_close(out.cpu(), expected, **tolerance(torch.float32))


def test_scores_of_any_size_do_not_overflow(device):
    paged = Paged([200], head_size=64)
    there = paged.to(device)
    q = 1e4 * randn(1, 6, 64)
    for options in (PLAIN, AttentionOptions(softcap=30.0)):
        out, expected = torch.empty_like(q, device=device), torch.empty_like(q)
        tail = (1.0, out, options)
        paged_decode(q.to(device), there.kv, there.tables, there.seq_lens, *tail)
        ORACLE.paged_decode(q, paged.kv, paged.tables, paged.seq_lens, 1.0, expected, options)
        # Scores near 1e5 are rounded to about 1e-2, and that goes into an exponent.
        torch.testing.assert_close(out.cpu(), expected, rtol=5e-2, atol=5e-2)


def test_an_empty_batch_is_no_error(device):
    paged = Paged([20], head_size=64).to(device)
    q = torch.empty(0, 6, 64, device=device)
    paged_decode(q, paged.kv, paged.tables[:0], paged.seq_lens[:0], 0.2, torch.empty_like(q))


def arguments(device) -> dict[str, object]:
    paged = Paged([20, 5], head_size=64).to(device)
    return {
        "q": randn(2, 6, 64).to(device),
        "kv": paged.kv,
        "block_tables": paged.tables,
        "seq_lens": paged.seq_lens,
        "scale": 0.2,
        "out": torch.full((2, 6, 64), CANARY, device=device),
    }


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("q", lambda x: x[:, :5], "multiple of 2"),
        ("q", lambda x: x.double(), "q .*need|kv .*need"),
        ("q", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "one after the other"),
        ("kv", lambda x: x.bfloat16(), "kv .*need"),
        ("kv", lambda x: x.to(torch.int8), "need scales"),
        ("kv", lambda x: x[..., :8], "need D"),
        ("kv", lambda x: x[:, :, :4], "block size"),
        ("kv", lambda x: x[:, :1], "dense heads"),
        ("block_tables", lambda x: x.long(), "block_tables"),
        ("block_tables", lambda x: x[:1], "block_tables"),
        ("block_tables", lambda x: x[0], "block_tables"),
        ("seq_lens", lambda x: x.long(), "seq_lens"),
        ("seq_lens", lambda x: x[:1], "seq_lens"),
        ("out", lambda x: x[:1], "out"),
        ("out", lambda x: x.bfloat16(), "out"),
        ("options", lambda _: AttentionOptions(window=-1), "window"),
        ("options", lambda _: AttentionOptions(slopes=torch.ones(3)), "slopes"),
        ("scales", lambda _: torch.ones(1), "no scales"),
    ],
)
def test_decode_refuses_tensors_that_do_not_fit(device, name, change, words):
    given = arguments(device)
    out = given["out"]
    with pytest.raises(ValueError, match=words):
        paged_decode(**given | {name: change(given.get(name))})
    assert (out == CANARY).all()
