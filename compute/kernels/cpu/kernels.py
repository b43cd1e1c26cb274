"""The interface of compute.kernels on the CPU: check the tensors, call the kernel."""

from __future__ import annotations

import functools
import itertools
import logging
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from compute import threads
from compute.config import ModelConfig
from compute.kernels import PLAIN, Activation, AttentionOptions, HeadNorms
from compute.kernels.cpu import decode, prefill, product, rope, rows
from compute.kernels.cpu.checks import (
    check_attention,
    check_chunks,
    check_kv,
    check_list,
    check_rows,
    check_tables,
)
from compute.kernels.cpu.jit import clear_cache
from compute.kernels.cpu.softmax import PIECE

_log = logging.getLogger(__name__)

# Fewer multiplications than this and waking the other threads costs more than it gains.
_WORTH_SHARING = 16_384

_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


class CpuKernels:
    """Meets compute.kernels.Kernels; results equal the oracle's up to rounding.

    Owns scratch memory that grows to the largest call; one thread at a time.
    """

    def __init__(self, team: threads.Team | None = None) -> None:
        """Runs on the process's team unless another is given."""
        self._team = team or threads.team()
        self._partials = torch.empty(0)
        self._tiles = torch.empty(self._team.num_threads, 0)

    def warm_up(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        progress: Callable[[int, int], None] = lambda _done, _total: None,
        *,
        int8: bool = False,
    ) -> None:
        """Compile what a model needs, or find it in the cache: seconds the first time.

        `int8`: for weights in int8. `progress` is told how many kernels of how many are there.
        """
        bf16, head_size = dtype == torch.bfloat16, config.head_size
        group = config.num_q_heads // config.num_kv_heads
        weights = product.KINDS[torch.int8 if int8 else dtype]
        compilations: list[Callable[[], object]] = [
            lambda: product.product_kernel(weights, bf16),
            lambda: product.product_kernel(weights, False),  # the head
            lambda: rope.rope_write_kv_kernel(head_size, bf16),
            lambda: decode.merge_kernel(head_size, bf16),
        ]
        if config.norm == "rms":
            compilations += [
                functools.partial(rows.rms_norm_kernel, config.hidden_size, bf16, adds)
                for adds in (False, True)
            ]
        if config.gated and config.activation == "silu":
            compilations.append(lambda: rows.silu_mul_kernel(bf16))
        for bent in {layer.window > 0 or config.softcap > 0 for layer in config.layers}:
            variant = (head_size, group, bf16, bent)
            compilations += [
                functools.partial(decode.paged_decode_kernel, *variant),
                functools.partial(prefill.paged_prefill_kernel, *variant),
            ]
        for done, compile_one in enumerate(compilations):
            progress(done, len(compilations))
            try:
                compile_one()
            except Exception as error:
                # A file of the cache that was cut off, say by a full disk, raises anything.
                _log.warning("compiled kernels cannot be used (%r); compiling again", error)
                clear_cache()
                compile_one()
        progress(len(compilations), len(compilations))

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        self._norm(x, None, weight, eps, out)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        self._norm(x, residual, weight, eps, out)

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        out.copy_(functional.layer_norm(x, x.shape[1:], weight, bias, eps))

    def add_layer_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        residual += x
        self.layer_norm(residual, weight, bias, eps, out)

    def activate(self, kind: Activation, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(_ACTIVATIONS[kind](x))

    def activate_mul(self, kind: Activation, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        if kind != "silu":
            gate, up = gate_up.chunk(2, dim=1)
            torch.mul(_ACTIVATIONS[kind](gate), up, out=out)
            return
        num_rows, size = out.shape
        check_rows("gate_up", gate_up, (num_rows, 2 * size), out.dtype)
        check_rows("out", out, (num_rows, size), out.dtype)
        self._run(
            rows.silu_mul_kernel(out.dtype == torch.bfloat16),
            8 * num_rows * size,
            "6q",
            gate_up.data_ptr(),
            gate_up.stride(0),
            out.data_ptr(),
            out.stride(0),
            num_rows,
            size,
        )

    def rope_write_kv(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv: torch.Tensor,
        num_q_heads: int,
        norms: HeadNorms | None = None,
        scales: torch.Tensor | None = None,
    ) -> None:
        check_kv(kv, qkv.dtype)
        _check_unscaled(scales)
        block_size, num_kv_heads, head_size = kv.shape[2:]
        num_tokens = qkv.shape[0]
        width = (num_q_heads + 2 * num_kv_heads) * head_size
        check_rows("qkv", qkv, (num_tokens, width), qkv.dtype)
        check_rows("cos", cos, (num_tokens, head_size), torch.float32)
        check_rows("sin", sin, (num_tokens, head_size), torch.float32)
        check_list("slot_mapping", slot_mapping, (num_tokens,), torch.int64)
        if norms is not None:
            heads = qkv.view(num_tokens, -1, head_size)
            _norm_heads(heads[:, :num_q_heads], norms.q, norms.eps)
            _norm_heads(heads[:, num_q_heads : num_q_heads + num_kv_heads], norms.k, norms.eps)
        self._run(
            rope.rope_write_kv_kernel(head_size, qkv.dtype == torch.bfloat16),
            num_tokens * width,
            "16q",
            qkv.data_ptr(),
            qkv.stride(0),
            cos.data_ptr(),
            cos.stride(0),
            sin.data_ptr(),
            sin.stride(0),
            slot_mapping.data_ptr(),
            kv.data_ptr(),
            *kv.stride()[:4],
            block_size,
            num_tokens,
            num_q_heads,
            num_kv_heads,
        )

    def paged_decode(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        options: AttentionOptions = PLAIN,
        scales: torch.Tensor | None = None,
    ) -> None:
        shape = check_attention(q, kv, out)
        _check_unscaled(scales)
        window, softcap, slopes = _bends(options, q.shape[1])
        num_sequences, num_q_heads, head_size = q.shape
        check_list("seq_lens", seq_lens, (num_sequences,), torch.int32)
        check_tables(block_tables, num_sequences)
        max_length = block_tables.shape[1] * shape.block_size
        max_pieces = -(-max_length // PIECE)
        self._reserve(
            decode.partial_floats(num_sequences * max_pieces, num_q_heads, head_size),
            decode.scratch_floats(num_q_heads, head_size),
        )
        self._run(
            decode.paged_decode_kernel(head_size, shape.group, shape.bf16, options != PLAIN),
            num_sequences * max_length * num_q_heads * head_size,
            "15qd5qdq",
            q.data_ptr(),
            q.stride(0),
            out.data_ptr(),
            out.stride(0),
            kv.data_ptr(),
            *kv.stride()[:4],
            shape.block_size,
            block_tables.data_ptr(),
            block_tables.stride(0),
            seq_lens.data_ptr(),
            num_sequences,
            shape.num_kv_heads,
            scale,
            self._partials.data_ptr(),
            max_pieces,
            self._tiles.data_ptr(),
            self._tiles.stride(0),
            window,
            softcap,
            slopes,
        )
        if max_pieces > 1:
            self._run(
                decode.merge_kernel(head_size, shape.bf16),
                num_sequences * max_pieces * num_q_heads * head_size,
                "8q",
                out.data_ptr(),
                out.stride(0),
                seq_lens.data_ptr(),
                num_sequences,
                num_q_heads,
                self._partials.data_ptr(),
                max_pieces,
                window,
            )

    def paged_prefill(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        block_tables: torch.Tensor,
        first_rows: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        options: AttentionOptions = PLAIN,
        scales: torch.Tensor | None = None,
    ) -> None:
        shape = check_attention(q, kv, out)
        _check_unscaled(scales)
        window, softcap, slopes = _bends(options, q.shape[1])
        num_chunks, head_size = seq_lens.shape[0], q.shape[2]
        check_list("seq_lens", seq_lens, (num_chunks,), torch.int32)
        check_list("first_rows", first_rows, (num_chunks + 1,), torch.int32)
        check_tables(block_tables, num_chunks)
        rows, lengths = first_rows.tolist(), seq_lens.tolist()
        check_chunks(rows, lengths, q.shape[0], block_tables.shape[1] * shape.block_size)
        self._reserve(0, prefill.scratch_floats(shape.group, head_size))
        compiled = prefill.paged_prefill_kernel(
            head_size, shape.group, shape.bf16, options != PLAIN
        )
        for c, (first, end) in enumerate(itertools.pairwise(rows)):
            self._run(
                compiled,
                (end - first) * lengths[c] * q.shape[1] * head_size,
                "14qd3qdq",
                q[first].data_ptr(),
                q.stride(0),
                out[first].data_ptr(),
                out.stride(0),
                kv.data_ptr(),
                *kv.stride()[:4],
                shape.block_size,
                block_tables[c].data_ptr(),
                end - first,
                shape.num_kv_heads,
                lengths[c],
                scale,
                self._tiles.data_ptr(),
                self._tiles.stride(0),
                window,
                softcap,
                slopes,
            )

    def copy_blocks(self, pool: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
        for source, target in pairs:
            pool[target].copy_(pool[source])

    def _norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        shape = out.shape
        check_rows("x", x, shape, out.dtype)
        check_rows("out", out, shape, out.dtype)
        check_list("weight", weight, shape[1:], out.dtype)
        if residual is not None:
            check_rows("residual", residual, shape, out.dtype)
        added_to = x if residual is None else residual
        num_rows, size = shape
        self._run(
            rows.rms_norm_kernel(size, out.dtype == torch.bfloat16, residual is not None),
            num_rows * size,
            "8qd",
            x.data_ptr(),
            x.stride(0),
            added_to.data_ptr(),
            added_to.stride(0),
            weight.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            num_rows,
            eps,
        )

    def _reserve(self, partial_floats: int, tile_floats: int) -> None:
        if self._partials.shape[0] < partial_floats:
            self._partials = torch.empty(partial_floats)
        if self._tiles.shape[1] < tile_floats:
            self._tiles = torch.empty(self._team.num_threads, tile_floats)

    def _run(self, compiled: Any, work: int, layout: str, *arguments: float) -> None:
        team = self._team
        if work < _WORTH_SHARING or team.num_threads == 1:
            team.run_alone(compiled.address, struct.pack("2q" + layout, 0, 1, *arguments))
        else:
            packed = struct.pack("2q" + layout, team.thread_number, team.num_threads, *arguments)
            team.run(compiled.address, packed)


def _norm_heads(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """RMSNorm of each head [T, H, D] in place."""
    heads.copy_(functional.rms_norm(heads.float(), weight.shape, weight.float(), eps))


def _bends(options: AttentionOptions, num_q_heads: int) -> tuple[int, float, int]:
    """Window, cap and the address of the slopes, as kernels take them."""
    slopes = options.slopes
    if slopes is not None:
        check_list("slopes", slopes, (num_q_heads,), torch.float32)
    return options.window, options.softcap, 0 if slopes is None else slopes.data_ptr()


def _check_unscaled(scales: torch.Tensor | None) -> None:
    if scales is not None:
        raise ValueError("scales: quantized KV is not for CPUs")
