"""The oracle: every kernel written the slow, obvious way.

Fast implementations are compared with this one, so it does nothing clever: one token
and one head at a time, everything in fp32, rounded once when it is stored. It meets
the interface of compute.kernels.Kernels, whose docstrings hold the shapes.
"""

from __future__ import annotations

import torch

from compute.kernels import PLAIN, Activation, AttentionOptions, HeadNorms

_QUANTIZED = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}  # the largest number of each


class ReferenceKernels:
    """Plain torch loops. Runs on any device torch runs on."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
    ) -> None:
        for t in range(x.shape[0]):
            out[t] = _rms_normed(x[t], weight, eps)

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

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        for t in range(x.shape[0]):
            row = x[t].float()
            centred = row - row.mean()
            normed = centred / torch.sqrt((centred * centred).mean() + eps)
            out[t] = normed * weight.float() + bias.float()

    def add_layer_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        for t in range(x.shape[0]):
            residual[t] = residual[t].float() + x[t].float()
        self.layer_norm(residual, weight, bias, eps, out)

    def activate(self, kind: Activation, x: torch.Tensor, out: torch.Tensor) -> None:
        for t in range(x.shape[0]):
            out[t] = _activated(kind, x[t].float())

    def activate_mul(self, kind: Activation, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        size = gate_up.shape[1] // 2
        for t in range(gate_up.shape[0]):
            gate, up = gate_up[t, :size].float(), gate_up[t, size:].float()
            out[t] = _activated(kind, gate) * up

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
        _, _, block_size, num_kv_heads, head_size = kv.shape
        heads = qkv.view(qkv.shape[0], num_q_heads + 2 * num_kv_heads, head_size)
        for t, slot in enumerate(slot_mapping.tolist()):
            block_id, offset = divmod(slot, block_size)
            for h in range(num_q_heads + num_kv_heads):
                head = heads[t, h].float()
                if norms is not None:
                    weight = norms.q if h < num_q_heads else norms.k
                    head = _rms_normed(head, weight, norms.eps)
                turned = _rotated(head, cos[t], sin[t])
                if h < num_q_heads:
                    heads[t, h] = turned
                elif slot >= 0:
                    _store(kv, scales, (block_id, 0, offset, h - num_q_heads), turned)
            for h in range(num_kv_heads if slot >= 0 else 0):
                value = heads[t, num_q_heads + num_kv_heads + h].float()
                _store(kv, scales, (block_id, 1, offset, h), value)

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
        for n, seq_len in enumerate(seq_lens.tolist()):
            keys, values = _gathered(kv, scales, block_tables[n], seq_len)
            _attend(q[n], keys, values, scale, options, out[n])

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
        rows = first_rows.tolist()
        for c, seq_len in enumerate(seq_lens.tolist()):
            keys, values = _gathered(kv, scales, block_tables[c], seq_len)
            for t in range(rows[c], rows[c + 1]):
                visible = seq_len - rows[c + 1] + t + 1
                _attend(q[t], keys[:visible], values[:visible], scale, options, out[t])

    def copy_blocks(self, pool: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
        for source, target in pairs:
            pool[target] = pool[source]


def _rms_normed(row: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    row = row.float()
    return row / torch.sqrt((row * row).mean() + eps) * weight.float()


def _activated(kind: Activation, x: torch.Tensor) -> torch.Tensor:
    if kind == "silu":
        return x / (1 + torch.exp(-x))
    if kind == "relu":
        return torch.where(x > 0, x, 0)
    if kind == "gelu":
        return x * 0.5 * (1 + torch.erf(x / 2**0.5))
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def _rotated(head: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """One head [D] in fp32, rotated by its position's cos and sin [D]."""
    half = head.shape[0] // 2
    turned = torch.cat((-head[half:], head[:half]))
    return head * cos + turned * sin


def _store(
    kv: torch.Tensor,
    scales: torch.Tensor | None,
    place: tuple[int, int, int, int],
    head: torch.Tensor,
) -> None:
    """One head [D] in fp32 to its place in the pool."""
    if scales is None:
        kv[place] = head.to(kv.dtype)
        return
    most = float(head.abs().max())
    scale = torch.tensor(most / _QUANTIZED[kv.dtype] if most > 0 else 1.0)
    scales[place] = scale
    scaled = head / scale
    kv[place] = (torch.round(scaled) if kv.dtype == torch.int8 else scaled).to(kv.dtype)


def _gathered(
    kv: torch.Tensor, scales: torch.Tensor | None, block_table: torch.Tensor, seq_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [S, Hkv, D] of a sequence in fp32, one token at a time."""
    block_size = kv.shape[2]
    table = block_table.tolist()
    slots = [(table[s // block_size], s % block_size) for s in range(seq_len)]
    both = []
    for part in range(2):
        tokens = torch.stack([kv[block_id, part, offset] for block_id, offset in slots]).float()
        if scales is not None:
            each = [scales[block_id, part, offset] for block_id, offset in slots]
            tokens = tokens * torch.stack(each)[:, :, None]
        both.append(tokens)
    return both[0], both[1]


def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    options: AttentionOptions,
    out: torch.Tensor,
) -> None:
    """out [Hq, D]: one token's heads over keys and values [S, Hkv, D], the last its own."""
    group = q.shape[0] // keys.shape[1]
    distances = torch.arange(1 - keys.shape[0], 1, device=q.device)  # of keys from the query
    for h in range(q.shape[0]):
        scores = keys[:, h // group] @ q[h].float() * scale
        if options.softcap:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        if options.slopes is not None:
            scores = scores + options.slopes[h] * distances
        if options.window:
            scores = torch.where(distances > -options.window, scores, -torch.inf)
        out[h] = torch.softmax(scores, dim=0) @ values[:, h // group]
