"""Rotate queries and keys, and write keys and values into their slots."""

from __future__ import annotations

import functools
from typing import Any

from compute.kernels.cpu.jit import elements, f32_at, i64_at, kernel, load, store, thread_number


@functools.cache
def rope_write_kv_kernel(head_size: int, bf16: bool) -> Any:
    """The whole of Kernels.rope_write_kv.

    Arguments: team (2); qkv, its row stride; cos, stride; sin, stride; slot_mapping;
    kv, strides of its first four axes; B; T; Hq; Hkv.
    """
    half = head_size // 2

    def rope_write_kv(arguments):  # type: ignore[no-untyped-def]
        me = thread_number(arguments)
        num_threads = arguments[1]
        block_stride, v_offset = arguments[10], arguments[11]
        token_stride, head_stride = arguments[12], arguments[13]
        block_size, num_tokens = arguments[14], arguments[15]
        num_q_heads, num_kv_heads = arguments[16], arguments[17]
        slot_mapping = i64_at(arguments[8])
        for t in range(me * num_tokens // num_threads, (me + 1) * num_tokens // num_threads):
            cos = f32_at(arguments[4] + t * arguments[5] * 4)
            sin = f32_at(arguments[6] + t * arguments[7] * 4)
            slot = slot_mapping[t]
            block_id = slot // block_size
            first = block_id * block_stride + (slot - block_id * block_size) * token_stride
            num_written = num_kv_heads if slot >= 0 else 0
            for h in range(num_q_heads + num_written):
                at = t * arguments[3] + h * head_size
                x = elements(arguments[2], at, bf16)
                if h < num_q_heads:
                    out = x
                else:
                    k_at = first + (h - num_q_heads) * head_stride
                    out = elements(arguments[9], k_at, bf16)
                for d in range(half):
                    low, high = load(x, d), load(x, d + half)
                    store(out, d, low * cos[d] - high * sin[d])
                    store(out, d + half, high * cos[d + half] + low * sin[d + half])
            for h in range(num_written):
                at = t * arguments[3] + (num_q_heads + num_kv_heads + h) * head_size
                value = elements(arguments[2], at, bf16)
                slot_v = elements(arguments[9], first + v_offset + h * head_stride, bf16)
                for d in range(head_size):
                    slot_v[d] = value[d]

    return kernel(rope_write_kv)
