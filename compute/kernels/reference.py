"""The oracle: every kernel written the slow, obvious way.

Fast implementations are compared with this one, so it does nothing clever: one token
and one head at a time, everything in fp32, rounded once when it is stored. It meets
the interface of compute.kernels.Kernels, whose docstrings hold the shapes.
"""

from __future__ import annotations

import torch


class ReferenceKernels:
    """Plain torch loops. Runs on any device torch runs on."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        for t in range(x.shape[0]):
            row = x[t].float()
            out[t] = row / torch.sqrt((row * row).mean() + eps) * weight.float()

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        for t in range(x.shape[0]):
            residual[t] = residual[t].float() + x[t].float()
        self.rms_norm(residual, weight, eps, out)

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        size = gate_up.shape[1] // 2
        for t in range(gate_up.shape[0]):
            gate, up = gate_up[t, :size].float(), gate_up[t, size:].float()
            out[t] = gate / (1 + torch.exp(-gate)) * up

    def rope_write_kv(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv: torch.Tensor,
        num_q_heads: int,
    ) -> None:
        _, _, block_size, num_kv_heads, head_size = kv.shape
        heads = qkv.view(qkv.shape[0], num_q_heads + 2 * num_kv_heads, head_size)
        for t, slot in enumerate(slot_mapping.tolist()):
            block_id, offset = divmod(slot, block_size)
            for h in range(num_q_heads):
                heads[t, h] = _rotated(heads[t, h], cos[t], sin[t])
            for h in range(num_kv_heads):
                key = heads[t, num_q_heads + h]
                kv[block_id, 0, offset, h] = _rotated(key, cos[t], sin[t]).to(kv.dtype)
                kv[block_id, 1, offset, h] = heads[t, num_q_heads + num_kv_heads + h]

    def paged_decode(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        for n, seq_len in enumerate(seq_lens.tolist()):
            keys, values = _gathered(kv, block_tables[n], seq_len)
            _attend(q[n], keys, values, scale, out[n])

    def paged_prefill(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        block_table: torch.Tensor,
        seq_len: int,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        keys, values = _gathered(kv, block_table, seq_len)
        first = seq_len - q.shape[0]
        for t in range(q.shape[0]):
            visible = first + t + 1
            _attend(q[t], keys[:visible], values[:visible], scale, out[t])

    def copy_blocks(self, pool: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
        for source, target in pairs:
            pool[target] = pool[source]


def _rotated(head: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """One head [D] rotated by its position's cos and sin [D], in fp32."""
    half = head.shape[0] // 2
    head = head.float()
    turned = torch.cat((-head[half:], head[:half]))
    return head * cos + turned * sin


def _gathered(
    kv: torch.Tensor, block_table: torch.Tensor, seq_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [S, Hkv, D] of a sequence in fp32, one token at a time."""
    block_size = kv.shape[2]
    table = block_table.tolist()
    slots = [(table[s // block_size], s % block_size) for s in range(seq_len)]
    keys = torch.stack([kv[block_id, 0, offset] for block_id, offset in slots])
    values = torch.stack([kv[block_id, 1, offset] for block_id, offset in slots])
    return keys.float(), values.float()


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, out: torch.Tensor
) -> None:
    """out [Hq, D] = softmax(q K^T * scale) V over all of keys and values [S, Hkv, D]."""
    group = q.shape[0] // keys.shape[1]
    for h in range(q.shape[0]):
        scores = keys[:, h // group] @ q[h].float() * scale
        out[h] = torch.softmax(scores, dim=0) @ values[:, h // group]
