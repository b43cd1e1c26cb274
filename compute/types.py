"""What goes in and out of the step runner, in builtin types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class KvShape:
    """KV of one token: [num_layers, 2, num_kv_heads, head_size] of dtype."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str  # "float32" | "bfloat16"


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """A C-order array [num_blocks, num_layers, 2, block_size, num_kv_heads, head_size]."""

    shape: KvShape
    block_size: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class PoolHandle:
    """Where a pool is. `generation` is random and never shared by two pools."""

    name: str
    offset_bytes: int
    size_bytes: int
    layout: PoolLayout
    generation: int
    host: PoolHandle | None = None  # of the host pool beside it


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How the next token is drawn. Temperature 0 is greedy; 0 / 1.0 / 0.0 switch limits off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sequence_index: int = 0
    return_logprob: bool = False


@dataclass(frozen=True, slots=True)
class SequenceState:
    """All that compute must know of a sequence; replaces what it knew before."""

    sequence_id: str
    token_ids: Sequence[int]
    block_ids: Sequence[int]
    sampling: SamplingOptions


@dataclass(frozen=True, slots=True)
class TableExtension:
    sequence_id: str
    first_index: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Ids from the pool's number of blocks on are those of the host pool."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + num_tokens) of a sequence; `sample` draws the one after them."""

    sequence_id: str
    start: int
    num_tokens: int
    sample: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One forward over one batch; fields are applied in their order."""

    step_id: int
    closed: Sequence[str] = ()
    sequences: Sequence[SequenceState] = ()
    extensions: Sequence[TableExtension] = ()
    copies: Sequence[BlockCopy] = ()
    chunks: Sequence[Chunk] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    sequence_id: str
    token_id: int
    logprob: float | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens in the order of the chunks that sample. `elapsed` in seconds."""

    step_id: int
    tokens: list[SampledToken] = field(default_factory=list)
    elapsed: float = 0.0
    copy_elapsed: float = 0.0  # of that


@dataclass(frozen=True, slots=True)
class ModelInfo:
    model_id: str
    fingerprint: bytes
    vocab_size: int
    max_sequence_length: int
    kv_shape: KvShape
