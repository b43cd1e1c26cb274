"""How checkpoints name and lay out tensors, as data.

Our own names: embedding, positions, norm, head, and of each layer `layers.<n>.<part>` with
the parts of `_parts`. A bias is `<name>.bias`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from compute.config import ModelConfig

Shape = tuple[int, ...]

_QKV = ("q", "k", "v")
_GATE_UP = ("gate", "up")
# Frequencies that older exports store; ours come from the configuration.
_FREQUENCIES = r"(?:.*\.)?rotary_emb\.inv_freq"
# Masks that older exports store among the weights.
_MASKS = r"(?:.*\.)?(?:attn|attention)\.(?:masked_)?bias"


class Module(NamedTuple):
    """One or more of our tensors within a module of the checkpoint.

    fused       our parts that it holds
    order       rows: one part below the other; heads: the parts of each head together;
                pairs: llama.cpp's order of a head's rows, whose rotary embedding turns
                neighbours (0, 1), (2, 3), …, while ours turns row i with row i + D/2
    transposed  stored as [in, out]
    """

    name: str
    fused: tuple[str, ...] = ()
    order: Literal["rows", "heads", "pairs"] = "rows"
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Names:
    """Of one kind of checkpoint. `prefix` is missing where only the base model was saved;
    what `derived` matches is of no use to us."""

    prefix: str
    layer: str
    whole: Mapping[str, str]
    parts: Mapping[str, Module]
    derived: str = _FREQUENCIES
    head: str = "lm_head"
    _pattern: re.Pattern[str] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_pattern", re.compile(self.derived))

    def is_derived(self, stored: str) -> bool:
        """Whether a stored tensor follows from the configuration and is not read."""
        return self._pattern.fullmatch(stored) is not None


@dataclass(frozen=True, slots=True)
class Place:
    """Where one of our tensors is in a checkpoint: in `stored`, which has `shape`."""

    stored: str
    shape: Shape
    module: Module
    part_rows: tuple[int, ...]  # of each fused part
    part: int
    head_size: int

    def cut(self, stored: torch.Tensor) -> torch.Tensor:
        """Our tensor, from the one that is stored."""
        rows = stored.t() if self.module.transposed and stored.dim() == 2 else stored
        rest, size = rows.shape[1:], self.head_size
        if self.module.order == "pairs":
            pairs = rows.reshape(-1, size // 2, 2, *rest)
            return pairs.transpose(1, 2).reshape(rows.shape)
        if self.module.order == "heads":
            together = rows.reshape(-1, len(self.part_rows), size, *rest)
            return together[:, self.part].reshape(-1, *rest)
        first = sum(self.part_rows[: self.part])
        return rows[first : first + self.part_rows[self.part]]


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor the model needs, by our names."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {"embedding": (config.vocab_size, hidden)}
    if not config.ropes:
        num_positions = config.position_offset + config.max_sequence_length
        shapes["positions"] = (num_positions, hidden)
    for layer in range(config.num_layers):
        for part, shape in _parts(config).items():
            shapes[f"layers.{layer}.{part}"] = shape
    shapes["norm"] = (hidden,)
    if config.norm == "layer":
        shapes["norm.bias"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["head"] = (config.vocab_size, hidden)
    return shapes


def places(config: ModelConfig, names: Names, prefix: str | None = None) -> dict[str, Place]:
    """Where a checkpoint has each of our tensors; `prefix` instead of that of `names`."""
    before = names.prefix if prefix is None else prefix
    rows = {part: shape[0] for part, shape in _parts(config).items()}
    found = {}
    for name, shape in expected_shapes(config).items():
        module, stored, kind = _find(name, names, before)
        fused = module.fused or (_part(name),)
        part_rows = tuple(rows.get(part, shape[0]) for part in fused)
        whole = (sum(part_rows), *shape[1:])
        found[name] = Place(
            stored=f"{stored}.{kind}",
            shape=whole[::-1] if module.transposed else whole,
            module=module,
            part_rows=part_rows,
            part=fused.index(_part(name)),
            head_size=config.head_size,
        )
    return found


def _find(name: str, names: Names, prefix: str) -> tuple[Module, str, str]:
    """The module of one of our tensors, its full name, and the kind of the tensor."""
    kind = "bias" if name.endswith(".bias") else "weight"
    name = name.removesuffix(".bias")
    if name == "head":
        return Module(names.head), names.head, kind
    if name in names.whole:
        return Module(names.whole[name]), prefix + names.whole[name], kind
    _, layer, part = name.split(".")
    module = names.parts[part]
    return module, f"{prefix}{names.layer.format(layer)}{module.name}", kind


def _part(name: str) -> str:
    """layers.3.q.bias -> q; norm -> norm"""
    return name.removesuffix(".bias").rpartition(".")[2]


def _parts(config: ModelConfig) -> dict[str, Shape]:
    """The tensors of a layer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size = config.num_q_heads * config.head_size
    kv_size = config.num_kv_heads * config.head_size
    qkv: dict[str, Shape] = {"q": (q_size, hidden), "k": (kv_size, hidden), "v": (kv_size, hidden)}
    output: dict[str, Shape] = {"o": (hidden, q_size)}
    mlp: dict[str, Shape] = {"gate": (inner, hidden)} if config.gated else {}
    mlp |= {"up": (inner, hidden), "down": (hidden, inner)}
    norms: dict[str, Shape] = dict.fromkeys(_norms(config), (hidden,))
    shapes = {**norms, **qkv, **output, **mlp}
    if config.head_norms:
        shapes |= {"q_norm": (config.head_size,), "k_norm": (config.head_size,)}
    for linears, has_bias in (
        (qkv, config.qkv_bias),
        (output, config.output_bias),
        (mlp, config.mlp_bias),
        (norms, config.norm == "layer"),
    ):
        if has_bias:
            shapes |= {f"{part}.bias": shape[:1] for part, shape in linears.items()}
    return shapes


def _norms(config: ModelConfig) -> Iterator[str]:
    yield from ("attention_norm", "mlp_norm")
    if config.post_norms:
        yield from ("post_attention_norm", "post_mlp_norm")


_SPLIT_ATTENTION = {
    "q": Module("self_attn.q_proj"),
    "k": Module("self_attn.k_proj"),
    "v": Module("self_attn.v_proj"),
    "o": Module("self_attn.o_proj"),
    "q_norm": Module("self_attn.q_norm"),
    "k_norm": Module("self_attn.k_norm"),
}
_SPLIT_MLP = {
    "gate": Module("mlp.gate_proj"),
    "up": Module("mlp.up_proj"),
    "down": Module("mlp.down_proj"),
}
_LLAMA_NORMS = {
    "attention_norm": Module("input_layernorm"),
    "mlp_norm": Module("post_attention_layernorm"),
}

LLAMA = Names(
    prefix="model.",
    layer="layers.{}.",
    whole={"embedding": "embed_tokens", "norm": "norm"},
    parts={**_SPLIT_ATTENTION, **_SPLIT_MLP, **_LLAMA_NORMS},
)
PHI3 = Names(
    prefix="model.",
    layer="layers.{}.",
    whole=LLAMA.whole,
    parts={
        **dict.fromkeys(_QKV, Module("self_attn.qkv_proj", _QKV)),
        "o": Module("self_attn.o_proj"),
        **dict.fromkeys(_GATE_UP, Module("mlp.gate_up_proj", _GATE_UP)),
        "down": Module("mlp.down_proj"),
        **_LLAMA_NORMS,
    },
)
GEMMA = Names(
    prefix="model.",
    layer="layers.{}.",
    whole=LLAMA.whole,
    parts={
        **_SPLIT_ATTENTION,
        **_SPLIT_MLP,
        "attention_norm": Module("input_layernorm"),
        "post_attention_norm": Module("post_attention_layernorm"),
        "mlp_norm": Module("pre_feedforward_layernorm"),
        "post_mlp_norm": Module("post_feedforward_layernorm"),
    },
)
GPT2 = Names(
    prefix="transformer.",
    layer="h.{}.",
    whole={"embedding": "wte", "positions": "wpe", "norm": "ln_f"},
    parts={
        **dict.fromkeys(_QKV, Module("attn.c_attn", _QKV, transposed=True)),
        "o": Module("attn.c_proj", transposed=True),
        "up": Module("mlp.c_fc", transposed=True),
        "down": Module("mlp.c_proj", transposed=True),
        "attention_norm": Module("ln_1"),
        "mlp_norm": Module("ln_2"),
    },
    derived=_MASKS,
)
OPT = Names(
    prefix="model.decoder.",
    layer="layers.{}.",
    whole={
        "embedding": "embed_tokens",
        "positions": "embed_positions",
        "norm": "final_layer_norm",
    },
    parts={
        **_SPLIT_ATTENTION,
        "o": Module("self_attn.out_proj"),
        "up": Module("fc1"),
        "down": Module("fc2"),
        "attention_norm": Module("self_attn_layer_norm"),
        "mlp_norm": Module("final_layer_norm"),
    },
)
GPT_NEOX = Names(
    prefix="gpt_neox.",
    layer="layers.{}.",
    whole={"embedding": "embed_in", "norm": "final_layer_norm"},
    parts={
        **dict.fromkeys(_QKV, Module("attention.query_key_value", _QKV, "heads")),
        "o": Module("attention.dense"),
        "up": Module("mlp.dense_h_to_4h"),
        "down": Module("mlp.dense_4h_to_h"),
        **_LLAMA_NORMS,
    },
    derived=f"{_FREQUENCIES}|{_MASKS}",
    head="embed_out",
)
GGUF_LLAMA = Names(
    prefix="",
    layer="blk.{}.",
    whole={"embedding": "token_embd", "norm": "output_norm"},
    parts={
        "attention_norm": Module("attn_norm"),
        "q": Module("attn_q", order="pairs"),
        "k": Module("attn_k", order="pairs"),
        "v": Module("attn_v"),
        "o": Module("attn_output"),
        "mlp_norm": Module("ffn_norm"),
        "gate": Module("ffn_gate"),
        "up": Module("ffn_up"),
        "down": Module("ffn_down"),
    },
    derived=r"rope_freqs\.weight",
    head="output",
)
