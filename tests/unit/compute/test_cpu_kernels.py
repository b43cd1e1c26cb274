"""The compiled kernels against the oracle, and what they must leave alone."""

from __future__ import annotations

import math

import numba
import numpy as np
import pytest
import torch

from compute.kernels import PLAIN, AttentionOptions, HeadNorms
from compute.kernels.cpu import CpuKernels
from compute.kernels.cpu import kernels as kernels_module
from compute.kernels.cpu.jit import exp_below_one
from compute.kernels.reference import ReferenceKernels
from compute.threads import Team

ORACLE = ReferenceKernels()
CANARY = 12345.0
NOWHERE = 2**31 - 1  # a block id that no pool has


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    if dtype == torch.float32:
        return {"rtol": 1e-5, "atol": 1e-5}  # sums in another order
    return {"rtol": 1e-2, "atol": 1e-2}  # bf16 output: 8 significant bits


@pytest.fixture(scope="module")
def kernels():
    return CpuKernels(Team(2))


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor in the middle of a larger one that is full of canaries: (whole, part)."""
    rows, *rest = shape
    whole = torch.full((rows + 2, *rest), CANARY, dtype=dtype)
    return whole, whole[1:-1]


def assert_guards_stand(whole: torch.Tensor) -> None:
    canary = torch.tensor(CANARY).to(whole.dtype)
    assert (whole[0] == canary).all()
    assert (whole[-1] == canary).all()


class Paged:
    """Sequences of random KV, scattered over the blocks of a pool whose rest is NaN."""

    def __init__(self, lengths, *, head_size, block_size, num_kv_heads=2, dtype=torch.float32):
        needed = [-(-length // block_size) for length in lengths]
        num_blocks = sum(needed) + 3
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(7)).tolist()
        # Three layers, so that a layer of the pool is a strided view.
        self.pool = torch.full(
            (num_blocks, 3, 2, block_size, num_kv_heads, head_size), math.nan, dtype=dtype
        )
        self.kv = self.pool[:, 1]
        self.tables = torch.full((len(lengths), max(needed) + 2), NOWHERE, dtype=torch.int32)
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32)
        for n, length in enumerate(lengths):
            for index in range(needed[n]):
                block_id = order.pop()
                self.tables[n, index] = block_id
                used = min(block_size, length - index * block_size)
                shape = (2, used, num_kv_heads, head_size)
                self.kv[block_id, :, :used] = randn(*shape, dtype=dtype, seed=block_id)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 3, 70])
def test_norms_equal_the_oracle(kernels, dtype, num_rows):
    x, weight = randn(num_rows, 576, dtype=dtype), randn(576, dtype=dtype, seed=1)
    residual = randn(num_rows, 576, dtype=dtype, seed=2)
    x_before, expected_residual = x.clone(), residual.clone()
    whole, out = guarded((num_rows, 576), dtype)
    expected = torch.empty_like(out)

    kernels.rms_norm(x, weight, 1e-5, out)
    ORACLE.rms_norm(x, weight, 1e-5, expected)
    torch.testing.assert_close(out, expected, **tolerance(dtype))

    kernels.add_rms_norm(x, residual, weight, 1e-5, out)
    ORACLE.add_rms_norm(x, expected_residual, weight, 1e-5, expected)
    torch.testing.assert_close(out, expected, **tolerance(dtype))
    torch.testing.assert_close(residual, expected_residual, rtol=0, atol=0)
    assert torch.equal(x, x_before)
    assert_guards_stand(whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 70])
def test_layer_norms_equal_the_oracle(kernels, dtype, num_rows):
    x = 3 + randn(num_rows, 96, dtype=dtype)
    residual = randn(num_rows, 96, dtype=dtype, seed=2)
    weights = randn(96, dtype=dtype, seed=1), randn(96, dtype=dtype, seed=3)
    x_before, expected_residual = x.clone(), residual.clone()
    whole, out = guarded((num_rows, 96), dtype)
    expected = torch.empty_like(out)

    kernels.layer_norm(x, *weights, 1e-5, out)
    ORACLE.layer_norm(x, *weights, 1e-5, expected)
    torch.testing.assert_close(out, expected, **tolerance(dtype))

    kernels.add_layer_norm(x, residual, *weights, 1e-5, out)
    ORACLE.add_layer_norm(x, expected_residual, *weights, 1e-5, expected)
    torch.testing.assert_close(out, expected, **tolerance(dtype))
    torch.testing.assert_close(residual, expected_residual, rtol=0, atol=0)
    assert torch.equal(x, x_before)
    assert_guards_stand(whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu"])
def test_activations_equal_the_oracle(kernels, dtype, kind):
    x = 3 * randn(5, 48, dtype=dtype)
    whole, out = guarded((5, 24), dtype)
    expected = torch.empty_like(out)
    kernels.activate_mul(kind, x, out)
    ORACLE.activate_mul(kind, x, expected)
    torch.testing.assert_close(out, expected, **tolerance(dtype))
    assert_guards_stand(whole)
    expected = torch.empty_like(x)
    ORACLE.activate(kind, x, expected)
    kernels.activate(kind, x, x)  # in place
    torch.testing.assert_close(x, expected, **tolerance(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "size"), [(1, 24), (5, 1536)])
def test_activate_mul_equals_the_oracle(kernels, dtype, num_rows, size):
    gate_up = 8 * randn(num_rows, 2 * size, dtype=dtype)
    before = gate_up.clone()
    whole, out = guarded((num_rows, size), dtype)
    expected = torch.empty_like(out)
    kernels.activate_mul("silu", gate_up, out)
    ORACLE.activate_mul("silu", gate_up, expected)
    torch.testing.assert_close(out, expected, **tolerance(dtype))
    assert torch.equal(gate_up, before)
    assert_guards_stand(whole)


def test_activate_mul_is_finite_at_the_ends_and_passes_nan_on(kernels):
    gate = torch.tensor([[-1e38, -100.0, -0.0, 0.0, 100.0, 1e38, math.nan, -math.inf]])
    out = torch.empty(1, 8)
    kernels.activate_mul("silu", torch.cat((gate, torch.ones(1, 8)), dim=1), out)
    torch.testing.assert_close(out[0, :6], torch.tensor([0.0, 0.0, 0.0, 0.0, 100.0, 1e38]))
    assert out[0, 6].isnan()


def test_exp_is_within_two_units_in_the_last_place():
    apply = numba.vectorize([numba.float32(numba.float32)])(lambda x: exp_below_one(x))
    x = np.concatenate([np.linspace(-87, 0, 1_000_001), -np.logspace(-10, 0, 1001)])
    x = x.astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    error = np.abs(apply(x) - exact) / np.spacing(exact.astype(np.float32))
    assert error.max() <= 2
    assert apply(np.float32(0)) == 1
    assert (apply(np.array([-87.1, -1e30, -np.inf], np.float32)) == 0).all()
    with np.errstate(invalid="ignore"):
        assert np.isnan(apply(np.float32(np.nan)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("num_tokens", "head_size", "block_size"), [(1, 64, 16), (40, 80, 8)])
def test_rope_writes_its_slots_and_nothing_else(
    kernels, dtype, normed, num_tokens, head_size, block_size
):
    num_q_heads, num_kv_heads = 6, 2
    pool = randn(50, 3, 2, block_size, num_kv_heads, head_size, dtype=dtype)
    expected_pool = pool.clone()
    qkv = randn(num_tokens, (num_q_heads + 2 * num_kv_heads) * head_size, dtype=dtype, seed=1)
    expected_qkv = qkv.clone()
    angles = randn(num_tokens, head_size, seed=2)
    slots = torch.randperm(50 * block_size, generator=torch.Generator().manual_seed(3))
    arguments = (angles.cos(), angles.sin(), slots[:num_tokens])
    weights = (randn(head_size, dtype=dtype, seed=seed) for seed in (4, 5))
    norms = HeadNorms(*weights, 1e-6) if normed else None
    kernels.rope_write_kv(qkv, *arguments, pool[:, 1], num_q_heads, norms)
    ORACLE.rope_write_kv(expected_qkv, *arguments, expected_pool[:, 1], num_q_heads, norms)
    queries = num_q_heads * head_size
    torch.testing.assert_close(qkv[:, :queries], expected_qkv[:, :queries], **tolerance(dtype))
    torch.testing.assert_close(pool, expected_pool, **tolerance(dtype))
    assert torch.equal(pool[:, ::2], expected_pool[:, ::2])


def slopes(num_heads: int) -> torch.Tensor:
    return torch.tensor([0.5 ** (h + 1) for h in range(num_heads)])


OPTIONS = [
    PLAIN,
    AttentionOptions(window=1),
    AttentionOptions(window=16),
    AttentionOptions(window=128, softcap=2.0),
    AttentionOptions(window=131),
    AttentionOptions(softcap=0.5),
    AttentionOptions(slopes=slopes(6)),
    AttentionOptions(window=150, softcap=3.0, slopes=slopes(6)),
]

SHAPES = [(16, 2), (32, 4), (64, 1), (64, 3), (80, 1), (96, 3), (128, 4), (64, 5)]


@pytest.mark.parametrize(("head_size", "group"), SHAPES)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_decode_equals_the_oracle(kernels, head_size, group, block_size):
    lengths = [1, block_size - 1, block_size, block_size + 1, 3 * block_size + 5, 128, 129, 300]
    check_decode(kernels, lengths, head_size, group, block_size, torch.float32)


@pytest.mark.parametrize(("head_size", "group"), [(64, 3), (80, 2)])
def test_decode_equals_the_oracle_in_bf16(kernels, head_size, group):
    check_decode(kernels, [1, 15, 16, 17, 300], head_size, group, 16, torch.bfloat16)


@pytest.mark.parametrize("options", OPTIONS)
def test_decode_with_options_equals_the_oracle(kernels, options):
    lengths = [1, 15, 16, 17, 127, 128, 129, 130, 131, 132, 255, 256, 257, 300, 400]
    check_decode(kernels, lengths, 32, 3, 16, torch.float32, options)


def check_decode(kernels, lengths, head_size, group, block_size, dtype, options=PLAIN):
    paged = Paged(lengths, head_size=head_size, block_size=block_size, dtype=dtype)
    # As in the decoder: queries are the head of wider rows.
    q = randn(len(lengths), 2 * group + 4, head_size, dtype=dtype)[:, : 2 * group]
    before, pool_before = q.clone(), paged.pool.clone()
    whole, out = guarded(tuple(q.shape), dtype)
    expected = torch.empty_like(out)
    arguments = (paged.tables, paged.seq_lens, 0.3)
    kernels.paged_decode(q, paged.kv, *arguments, out, options)
    ORACLE.paged_decode(q, paged.kv, *arguments, expected, options)
    torch.testing.assert_close(out, expected, **tolerance(dtype))
    assert_guards_stand(whole)
    assert torch.equal(q, before)
    assert torch.equal(paged.pool.nan_to_num(), pool_before.nan_to_num())


def test_decode_of_sequences_that_share_blocks(kernels):
    paged = Paged([40, 40, 33], head_size=64, block_size=16)
    paged.tables[1, :2] = paged.tables[0, :2]
    paged.tables[2, :2] = paged.tables[0, :2]
    q = randn(1, 6, 64).expand(3, -1, -1).contiguous()
    out, expected = torch.empty_like(q), torch.empty_like(q)
    kernels.paged_decode(q, paged.kv, paged.tables, paged.seq_lens, 0.2, out)
    ORACLE.paged_decode(q, paged.kv, paged.tables, paged.seq_lens, 0.2, expected)
    torch.testing.assert_close(out, expected, **tolerance(torch.float32))


@pytest.mark.parametrize("options", OPTIONS)
def test_a_sequence_gets_the_same_result_alone_in_a_batch_and_on_one_thread(kernels, options):
    paged = Paged([700, 3, 129, 64], head_size=64, block_size=16)
    q = randn(4, 6, 64)
    together, alone, serial = (torch.empty_like(q) for _ in range(3))
    kernels.paged_decode(q, paged.kv, paged.tables, paged.seq_lens, 0.2, together, options)
    for n in range(4):
        row = slice(n, n + 1)
        kernels.paged_decode(
            q[row], paged.kv, paged.tables[row], paged.seq_lens[row], 0.2, alone[row], options
        )
    CpuKernels(Team(1)).paged_decode(
        q, paged.kv, paged.tables, paged.seq_lens, 0.2, serial, options
    )
    assert torch.equal(together, alone)
    assert torch.equal(together, serial)


def test_broken_kv_spoils_only_its_own_sequence(kernels):
    paged = Paged([20, 20], head_size=64, block_size=16)
    paged.kv[paged.tables[1, 0], 0, 3] = math.nan
    q = randn(2, 6, 64)
    out = torch.empty_like(q)
    kernels.paged_decode(q, paged.kv, paged.tables, paged.seq_lens, 0.2, out)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


def test_scores_of_any_size_do_not_overflow(kernels):
    paged = Paged([200], head_size=64, block_size=16)
    q = 1e4 * randn(1, 6, 64)
    out, expected = torch.empty_like(q), torch.empty_like(q)
    kernels.paged_decode(q, paged.kv, paged.tables, paged.seq_lens, 1.0, out)
    ORACLE.paged_decode(q, paged.kv, paged.tables, paged.seq_lens, 1.0, expected)
    # Scores near 1e5 are rounded to about 1e-2, and that goes into an exponent.
    torch.testing.assert_close(out, expected, rtol=5e-2, atol=5e-2)


def test_blocks_past_two_to_the_31_elements_are_reached(kernels, tmp_path):
    num_blocks, last = 2**21 + 8, 2**21 + 7  # blocks of 2^10 elements
    shape = (num_blocks, 2, 8, 1, 64)
    # Sparse: only the pages written to exist.
    file = np.memmap(tmp_path / "pool", dtype=np.float32, mode="w+", shape=shape)
    kv = torch.from_numpy(file)
    qkv, angles = randn(2, 3 * 64), randn(2, 64, seed=1)
    slots = torch.tensor([last * 8, last * 8 + 1])
    kernels.rope_write_kv(qkv, angles.cos(), angles.sin(), slots, kv, 1)
    torch.testing.assert_close(kv[last, 1, :2, 0], qkv[:, 128:], rtol=0, atol=0)
    assert (kv[:8] == 0).all()

    table = torch.tensor([[last]], dtype=torch.int32)
    q = qkv.view(2, 3, 64)[:, :1]
    out, expected = torch.empty(2, 1, 64), torch.empty(2, 1, 64)
    prefill(kernels, q, kv, table, 2, 0.2, out)
    prefill(ORACLE, q, kv, table, 2, 0.2, expected)
    torch.testing.assert_close(out, expected, **tolerance(torch.float32))
    decoded = torch.empty(1, 1, 64)
    kernels.paged_decode(q[1:], kv, table, torch.tensor([2], dtype=torch.int32), 0.2, decoded)
    torch.testing.assert_close(decoded, expected[1:], **tolerance(torch.float32))


@pytest.mark.parametrize(("head_size", "group"), SHAPES)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_prefill_equals_the_oracle(kernels, head_size, group, block_size):
    for num_tokens, seq_len in [(1, 1), (2, 2), (5, 9), (33, 33), (40, 170)]:
        check_prefill(kernels, num_tokens, seq_len, head_size, group, block_size, torch.float32)


@pytest.mark.parametrize(("head_size", "group"), [(64, 3), (80, 2)])
def test_prefill_equals_the_oracle_in_bf16(kernels, head_size, group):
    check_prefill(kernels, 40, 170, head_size, group, 16, torch.bfloat16)


def prefill(kernels, q, kv, tables, seq_len, scale, out, options=PLAIN) -> None:
    """One chunk, of the first table."""
    first_rows = torch.tensor([0, q.shape[0]], dtype=torch.int32)
    lengths = torch.tensor([seq_len], dtype=torch.int32)
    kernels.paged_prefill(q, kv, tables[:1], first_rows, lengths, scale, out, options)


@pytest.mark.parametrize("options", OPTIONS)
def test_prefill_with_options_equals_the_oracle(kernels, options):
    for num_tokens, seq_len in [(2, 2), (33, 33), (140, 300), (40, 170), (5, 260)]:
        check_prefill(kernels, num_tokens, seq_len, 32, 3, 16, torch.float32, options)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_token_has_the_same_bits_decoded_and_in_a_chunk(kernels, options):
    paged = Paged([300], head_size=64, block_size=16)
    q = randn(300, 6, 64)
    chunked, decoded = torch.empty_like(q), torch.empty_like(q)
    prefill(kernels, q, paged.kv, paged.tables, 300, 0.2, chunked, options)
    tables = paged.tables.expand(300, -1).contiguous()
    lengths = torch.arange(1, 301, dtype=torch.int32)
    kernels.paged_decode(q, paged.kv, tables, lengths, 0.2, decoded, options)
    assert torch.equal(chunked, decoded)


def test_chunks_of_many_sequences_are_computed_in_one_call(kernels):
    lengths, sizes = [40, 1, 170, 33], [7, 1, 50, 33]
    paged = Paged(lengths, head_size=64, block_size=16)
    first_rows = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q = randn(sum(sizes), 6, 64)
    whole, out = guarded(tuple(q.shape), torch.float32)
    expected = torch.empty_like(out)
    arguments = (paged.tables, first_rows, paged.seq_lens, 0.3)
    kernels.paged_prefill(q, paged.kv, *arguments, out)
    ORACLE.paged_prefill(q, paged.kv, *arguments, expected)
    torch.testing.assert_close(out, expected, **tolerance(torch.float32))
    assert_guards_stand(whole)


def check_prefill(kernels, num_tokens, seq_len, head_size, group, block_size, dtype, options=PLAIN):
    paged = Paged([seq_len], head_size=head_size, block_size=block_size, dtype=dtype)
    q = randn(num_tokens, 2 * group + 4, head_size, dtype=dtype)[:, : 2 * group]
    before, pool_before = q.clone(), paged.pool.clone()
    whole, out = guarded(tuple(q.shape), dtype)
    expected = torch.empty_like(out)
    prefill(kernels, q, paged.kv, paged.tables, seq_len, 0.3, out, options)
    prefill(ORACLE, q, paged.kv, paged.tables, seq_len, 0.3, expected, options)
    torch.testing.assert_close(out, expected, **tolerance(dtype))
    assert_guards_stand(whole)
    assert torch.equal(q, before)
    assert torch.equal(paged.pool.nan_to_num(), pool_before.nan_to_num())


@pytest.mark.parametrize("options", OPTIONS)
def test_prefill_gives_the_same_result_however_the_prompt_is_cut(kernels, options):
    paged = Paged([300], head_size=64, block_size=16)
    q = randn(300, 6, 64)
    whole, parts = torch.empty_like(q), torch.empty_like(q)
    prefill(kernels, q, paged.kv, paged.tables, 300, 0.2, whole, options)
    for start, end in [(0, 1), (1, 47), (47, 48), (48, 300)]:
        rows = slice(start, end)
        prefill(kernels, q[rows], paged.kv, paged.tables, end, 0.2, parts[rows], options)
    assert torch.equal(whole, parts)


def test_copies_happen_in_order_and_touch_their_targets_only(kernels):
    pool = randn(6, 2, 2, 8, 1, 16)
    before = pool.clone()
    kernels.copy_blocks(pool, [(0, 1), (1, 2), (4, 0)])
    for block_id, source in enumerate([4, 0, 0, 3, 4, 5]):
        assert torch.equal(pool[block_id], before[source])


def decode_arguments() -> dict[str, object]:
    paged = Paged([20, 5], head_size=64, block_size=16)
    return {
        "q": randn(2, 6, 64),
        "kv": paged.kv,
        "block_tables": paged.tables,
        "seq_lens": paged.seq_lens,
        "scale": 0.2,
        "out": torch.full((2, 6, 64), CANARY),
    }


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", lambda x: x[:, :5]),
        ("q", lambda x: x.double()),
        ("q", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
        ("kv", lambda x: x.bfloat16()),
        ("kv", lambda x: x[..., :4]),
        ("kv", lambda x: x[:, :, :4]),
        ("kv", lambda x: x[:, :1]),
        ("block_tables", lambda x: x.long()),
        ("block_tables", lambda x: x[:1]),
        ("block_tables", lambda x: x[0]),
        ("seq_lens", lambda x: x.long()),
        ("seq_lens", lambda x: x[:1]),
        ("out", lambda x: x[:1]),
        ("out", lambda x: x.bfloat16()),
    ],
)
def test_decode_refuses_tensors_that_do_not_fit(kernels, name, change):
    arguments = decode_arguments()
    out = arguments["out"]
    with pytest.raises(ValueError, match=r"need|heads"):
        kernels.paged_decode(**arguments | {name: change(arguments[name])})
    assert (out == CANARY).all()


def test_prefill_refuses_a_length_that_does_not_fit(kernels):
    paged = Paged([20], head_size=64, block_size=16)
    q, out = randn(4, 6, 64), torch.full((4, 6, 64), CANARY)
    for seq_len in (3, 16 * paged.tables.shape[1] + 1):
        with pytest.raises(ValueError, match="seq_len"):
            prefill(kernels, q, paged.kv, paged.tables, seq_len, 0.2, out)
    assert (out == CANARY).all()


def test_row_kernels_refuse_tensors_that_do_not_fit(kernels):
    x, out = randn(2, 16), torch.full((2, 16), CANARY)
    for bad in (x[:1], x[:, :8], x.double(), randn(16, 2).t()):
        with pytest.raises(ValueError, match="x "):
            kernels.rms_norm(bad, torch.ones(16), 1e-5, out)
    with pytest.raises(ValueError, match="weight"):
        kernels.rms_norm(x, torch.ones(8), 1e-5, out)
    with pytest.raises(ValueError, match="gate_up"):
        kernels.activate_mul("silu", x, out)
    assert (out == CANARY).all()


def test_rope_refuses_tensors_that_do_not_fit(kernels):
    kv = torch.full((4, 2, 8, 1, 16), CANARY)
    angles, slots = torch.ones(2, 16), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="qkv"):
        kernels.rope_write_kv(randn(2, 40), angles, angles, slots, kv, 1)
    with pytest.raises(ValueError, match="cos"):
        kernels.rope_write_kv(randn(2, 48), angles[:1], angles, slots, kv, 1)
    with pytest.raises(ValueError, match="slot_mapping"):
        kernels.rope_write_kv(randn(2, 48), angles, angles, slots.int(), kv, 1)
    assert (kv == CANARY).all()


def test_damaged_files_of_compiled_kernels_are_compiled_again(make_model, monkeypatch, caplog):
    """As a full disk leaves them; what loading one raises can be anything."""
    attempts, cleared = [], []

    def damaged(_bf16):
        attempts.append(1)
        if len(attempts) == 1:
            raise EOFError("pickle data was truncated")

    monkeypatch.setattr(kernels_module.rows, "silu_mul_kernel", damaged)
    monkeypatch.setattr(kernels_module, "clear_cache", lambda: cleared.append(1))
    told = []
    config = make_model(torch.float32, CpuKernels()).decoder.config
    CpuKernels().warm_up(config, torch.float32, lambda *state: told.append(state))
    assert (len(attempts), len(cleared)) == (2, 1)
    assert "truncated" in caplog.text
    assert told[0] == (0, told[0][1])
    assert told[-1] == (told[0][1], told[0][1])
