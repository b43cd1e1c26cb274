"""Norm, rotation and writing against the oracle, byte for byte where KV is quantized."""

from __future__ import annotations

import pytest
import torch

from compute.kernels import HeadNorms
from compute.kernels.triton.rope_write_kv import rope_write_kv
from tests.unit.compute.triton.support import (
    CANARY,
    E4M3,
    ORACLE,
    assert_same_bits,
    randn,
    tolerance,
)

# tokens, head size, block size, (Hq, Hkv), dtype, KV dtype, norms
GRID = [
    (1, 64, 16, (6, 2), torch.float32, None, False),
    (7, 80, 8, (6, 2), torch.float16, None, True),
    (5, 96, 32, (3, 1), torch.bfloat16, None, False),
    (3, 128, 16, (32, 8), torch.bfloat16, None, True),
    (4, 256, 8, (2, 2), torch.float32, None, True),
    (5, 64, 32, (5, 1), torch.float16, E4M3, False),
    (3, 80, 16, (4, 4), torch.float32, torch.int8, True),
    (3, 96, 8, (9, 3), torch.float32, E4M3, True),
    (4, 128, 32, (4, 2), torch.float16, torch.int8, False),
    (2, 256, 16, (8, 1), torch.float32, E4M3, False),
]


def make_pool(block_size, num_kv_heads, head_size, dtype):
    """Three layers of random bytes, or numbers, and of scales if they are quantized."""
    shape = (12, 3, 2, block_size, num_kv_heads, head_size)
    if dtype not in (E4M3, torch.int8):
        return randn(*shape, dtype=dtype), None
    generator = torch.Generator().manual_seed(5)
    numbers = torch.randint(-127, 127, shape, generator=generator, dtype=torch.int8)
    numbers[numbers == -1] = 0  # NaN in e4m3
    return numbers.view(dtype), torch.full(shape[:5], CANARY)


@pytest.mark.parametrize("case", GRID, ids=str)
def test_rope_writes_its_slots_and_nothing_else(device, case):
    num_tokens, head_size, block_size, (num_q_heads, num_kv_heads), dtype, kv_dtype, has_norms = (
        case
    )
    pool, scales = make_pool(block_size, num_kv_heads, head_size, kv_dtype or dtype)
    there = pool.clone().to(device)
    scales_there = None if scales is None else scales.clone().to(device)
    width = (num_q_heads + 2 * num_kv_heads) * head_size
    # Rows that lie apart
    wide = randn(num_tokens, width + 32, dtype=dtype, seed=1)
    qkv, qkv_there = wide[:, :width].clone(), wide.clone().to(device)[:, :width]
    angles = randn(num_tokens, head_size, seed=2)
    norms = norms_there = None
    if has_norms:
        q_norm, k_norm = (1 + randn(head_size, dtype=dtype, seed=s) / 4 for s in (3, 4))
        norms = HeadNorms(q_norm, k_norm, 1e-5)
        norms_there = HeadNorms(q_norm.to(device), k_norm.to(device), 1e-5)
    order = torch.randperm(12 * block_size, generator=torch.Generator().manual_seed(3))
    slots = order[:num_tokens].clone()
    slots[num_tokens // 2 + 1 :: 5] = -1  # written nowhere
    rope_write_kv(
        qkv_there,
        angles.cos().to(device),
        angles.sin().to(device),
        slots.to(device),
        there[:, 1],
        num_q_heads,
        norms_there,
        None if scales_there is None else scales_there[:, 1],
    )
    ORACLE.rope_write_kv(
        qkv,
        angles.cos(),
        angles.sin(),
        slots,
        pool[:, 1],
        num_q_heads,
        norms,
        None if scales is None else scales[:, 1],
    )
    torch.testing.assert_close(qkv_there.cpu(), qkv, **tolerance(dtype))
    assert_same_bits(qkv_there[:, num_q_heads * head_size :], qkv[:, num_q_heads * head_size :])
    assert_same_bits(there[:, ::2], pool[:, ::2])
    if scales is None:
        torch.testing.assert_close(there.cpu(), pool, **tolerance(dtype))
        return
    torch.testing.assert_close(scales_there.cpu(), scales, rtol=1e-6, atol=0)  # sums, sqrt
    assert_nearly_same_numbers(there.cpu(), pool)


def assert_nearly_same_numbers(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the few that fp32 puts on the other side of a rounding: one step off."""
    differ = actual.view(torch.uint8) != expected.view(torch.uint8)
    assert differ.float().mean() < 1e-3
    step = 1 if actual.dtype == torch.int8 else 32  # the largest numbers of e4m3 are 32 apart
    assert ((actual.float() - expected.float()).abs() <= step).all()


@pytest.mark.parametrize("kv_dtype", [E4M3, torch.int8])
def test_quantized_values_have_the_bytes_of_the_oracle(device, kv_dtype):
    """Values are not rotated, so nothing is rounded before: not one byte differs."""
    values = torch.cat(
        (randn(6, 64), 1e-30 * randn(1, 64), torch.zeros(1, 64), 1e30 * randn(1, 64))
    )
    qkv = torch.cat((torch.zeros(9, 128), values), dim=1)
    results = []
    for run, where in ((rope_write_kv, device), (ORACLE.rope_write_kv, torch.device("cpu"))):
        kv = torch.zeros(2, 2, 8, 1, 64, dtype=torch.int8, device=where).view(kv_dtype)
        scales = torch.zeros(2, 2, 8, 1, device=where)
        angles = torch.ones(9, 64, device=where)
        slots = torch.arange(9, device=where)
        run(qkv.clone().to(where), angles, angles, slots, kv, 1, None, scales)
        results.append((kv.cpu(), scales.cpu()))
    (kv, scales), (expected_kv, expected_scales) = results
    assert_same_bits(scales, expected_scales)
    assert_same_bits(kv, expected_kv)
    assert scales[0, 1, 7, 0] == 1  # all zeros


def test_rope_refuses_tensors_that_do_not_fit(device):
    kv = torch.full((4, 2, 8, 1, 16), CANARY, device=device)
    angles, slots = torch.ones(2, 16, device=device), torch.tensor([0, 1], device=device)
    qkv = randn(2, 48).to(device)
    good = {"qkv": qkv, "cos": angles, "sin": angles, "slot_mapping": slots, "kv": kv}
    bad_norms = HeadNorms(torch.ones(8, device=device), torch.ones(16, device=device), 1e-5)
    for change, words in [
        ({"qkv": qkv[:, :40]}, "qkv"),
        ({"qkv": qkv.bfloat16()}, "kv .*need"),
        ({"cos": angles[:1]}, "cos"),
        ({"sin": angles.half()}, "sin"),
        ({"slot_mapping": slots.int()}, "slot_mapping"),
        ({"kv": kv.to(torch.int8)}, "need scales"),
        ({"scales": torch.ones(4, 2, 8, 1, device=device)}, "no scales"),
        ({"norms": bad_norms}, "norms.q"),
    ]:
        with pytest.raises(ValueError, match=words):
            rope_write_kv(**good | {"num_q_heads": 1} | change)
    assert (kv == CANARY).all()
