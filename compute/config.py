"""What a model is: the numbers and choices by which one decoder computes every family.

compute.families reads them from configurations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from compute.kernels import Activation
from compute.rope import RopeConfig
from compute.types import KvShape


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ between layers.

    window  tokens that a query sees, itself included; 0: all before it
    rope    which of the model's ropes turns its queries and keys
    """

    window: int = 0
    rope: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder: in each layer attention and an MLP, each behind a norm.

    norm, norm_eps       RMSNorm, or LayerNorm with biases
    norm_offset          what is added to the stored weights of norms
    activation, gated    MLP: down(act(gate(x)) * up(x)), or ungated down(act(up(x)))
    parallel             attention and MLP both read the layer's input, and are added to it
                         together; else the MLP reads what attention has added to
    post_norms           further norms behind attention and MLP
    head_norms           RMSNorm over each head of queries and keys
    ropes                empty: positions are learned, and added to the embedding
    position_offset      rows of the table of learned positions before the first one
    softcap, final_softcap  caps of attention scores and of logits; 0: none
    max_sequence_length  the longest sequence whose positions are computed exactly as the
                         model defines them (see compute.rope)
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_size: int
    layers: tuple[LayerConfig, ...]
    ropes: tuple[RopeConfig, ...]
    max_sequence_length: int
    norm_eps: float
    norm: Literal["rms", "layer"] = "rms"
    norm_offset: float = 0.0
    activation: Activation = "silu"
    gated: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    parallel: bool = False
    post_norms: bool = False
    head_norms: bool = False
    position_offset: int = 0
    attention_scale: float = 0.0  # 0: head_size ** -0.5
    embedding_scale: float = 1.0
    softcap: float = 0.0
    final_softcap: float = 0.0
    tie_word_embeddings: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def scale(self) -> float:
        """Of attention scores."""
        return self.attention_scale or self.head_size**-0.5

    @property
    def num_rotated(self) -> int:
        """Leading elements of a head that turn with its position."""
        return self.ropes[0].head_size if self.ropes else 0

    def kv_shape(self, dtype: str) -> KvShape:
        """The KV of one token of this model, kept in `dtype`."""
        return KvShape(self.num_layers, self.num_kv_heads, self.head_size, dtype)
