"""Copies within a pool, and blocks into and out of a buffer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compute.kernels.triton.copy_blocks import copy_blocks, waves
from compute.kernels.triton.gather_blocks import gather_blocks, scatter_blocks
from tests.unit.compute.triton.support import (
    CANARY,
    E4M3,
    ORACLE,
    assert_guards_stand,
    assert_same_bits,
    guarded,
    randn,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E4M3])
@pytest.mark.parametrize(
    "pairs",
    [
        [],
        [(3, 3)],
        [(0, 1), (0, 2), (4, 5)],
        [(0, 1), (1, 2), (4, 0)],
        [(0, 1), (2, 1), (1, 3), (5, 2)],
    ],
    ids=str,
)
def test_copies_happen_in_order_and_touch_their_targets_only(device, dtype, pairs):
    pool = randn(6, 2, 2, 8, 1, 16).to(dtype).to(device)
    expected = pool.clone()
    copy_blocks(pool, pairs)
    ORACLE.copy_blocks(expected, pairs)
    assert_same_bits(pool, expected)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
@settings(max_examples=200, deadline=None)
def test_pairs_of_a_wave_can_run_in_any_order(pairs):
    one_by_one = list(range(6))
    for source, target in pairs:
        one_by_one[target] = one_by_one[source]
    in_waves = list(range(6))
    for wave in waves(pairs):
        before = list(in_waves)
        for source, target in reversed(wave):
            in_waves[target] = before[source]
            assert in_waves[source] == before[source]
    assert in_waves == one_by_one


def test_copies_that_do_not_touch_each_other_are_one_wave():
    assert len(waves([(0, 10), (0, 11), (1, 12), (2, 2)])) == 1


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((7, 3, 2, 8, 1, 16), torch.float16), ((7, 5), torch.int8), ((7, 2, 5000), torch.float32)],
    ids=str,
)
def test_gathered_blocks_come_back_where_they_were(device, shape, dtype):
    pool = (50 * randn(*shape)).to(dtype).to(device)
    before = pool.clone()
    block_ids = torch.tensor([5, 0, 6, 2], device=device)
    whole, staging = guarded((4, *shape[1:]), dtype, device)
    gather_blocks(pool, block_ids, staging)
    assert_same_bits(staging, pool[block_ids])
    assert_same_bits(pool, before)
    assert_guards_stand(whole)

    pool.zero_()
    scatter_blocks(pool, block_ids, staging)
    expected = torch.zeros_like(before)
    expected[block_ids] = before[block_ids]
    assert_same_bits(pool, expected)
    assert_guards_stand(whole)


def test_rows_of_a_buffer_beyond_the_blocks_stay(device):
    pool = randn(4, 8, 16).to(device)
    staging = torch.full((3, 8, 16), CANARY, device=device)
    gather_blocks(pool, torch.tensor([2], device=device), staging)
    assert_same_bits(staging[0], pool[2])
    assert (staging[1:] == CANARY).all()


def test_blocks_that_do_not_fit_are_refused(device):
    pool = torch.full((4, 8, 16), CANARY, device=device)
    ids, staging = torch.tensor([0, 1], device=device), randn(2, 8, 16).to(device)
    with pytest.raises(ValueError, match="need blocks of 0 to 3"):
        copy_blocks(pool, [(0, 1), (1, 4)])
    with pytest.raises(ValueError, match="dense blocks"):
        copy_blocks(pool.transpose(1, 2), [(0, 1)])
    for change, words in [
        ({"block_ids": ids.int()}, "int64"),
        ({"staging": staging[:1]}, "room for 2"),
        ({"staging": staging.half()}, "need blocks"),
        ({"staging": staging[:, :4]}, "need blocks"),
    ]:
        arguments = {"pool": pool, "block_ids": ids, "staging": staging} | change
        with pytest.raises(ValueError, match=words):
            gather_blocks(**arguments)
        with pytest.raises(ValueError, match=words):
            scatter_blocks(**arguments)
    assert (pool == CANARY).all()
