"""What goes in and out of the step runner, in builtin types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "int8": 1}
QUANTIZED = ("fp8_e4m3", "int8")  # of these, each head of a token has a scale
SCALE_BYTES = 4  # fp32


@dataclass(frozen=True, slots=True)
class KvShape:
    """KV of one token: [num_layers, 2, num_kv_heads, head_size] of dtype, and its scales."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str  # one of DTYPE_BYTES

    @property
    def is_quantized(self) -> bool:
        return self.dtype in QUANTIZED


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """A C-order array [num_blocks, num_layers, 2, block_size, num_kv_heads, head_size].

    A plane is what a block has of one layer's keys, or values: [block_size, num_kv_heads,
    head_size] elements. In quantized KV their scales, [block_size, num_kv_heads] in fp32,
    are behind them.
    """

    shape: KvShape
    block_size: int
    num_blocks: int

    @property
    def plane_elements_bytes(self) -> int:
        """Of a plane without scales."""
        heads = self.block_size * self.shape.num_kv_heads
        return heads * self.shape.head_size * DTYPE_BYTES[self.shape.dtype]

    @property
    def plane_bytes(self) -> int:
        scales = self.block_size * self.shape.num_kv_heads if self.shape.is_quantized else 0
        return self.plane_elements_bytes + scales * SCALE_BYTES

    @property
    def block_bytes(self) -> int:
        return 2 * self.shape.num_layers * self.plane_bytes

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


@dataclass(frozen=True, slots=True)
class PosixMemory:
    """A POSIX shared memory object, by its name without the leading slash."""

    name: str


@dataclass(frozen=True, slots=True)
class CudaIpcMemory:
    """An allocation on a CUDA device, by its handle of legacy CUDA IPC, 64 bytes.

    It lasts as long as the process that made it, which its PID namespace knows as
    `exporter_pid`. Namespaces are told apart by their inode numbers.
    """

    handle: bytes
    device_uuid: bytes
    exporter_pid: int
    exporter_pid_namespace: int


SharedMemory = PosixMemory | CudaIpcMemory


@dataclass(frozen=True, slots=True)
class PoolHandle:
    """Where a pool is. `generation` is random and never shared by two pools."""

    memory: SharedMemory
    offset_bytes: int
    size_bytes: int
    layout: PoolLayout
    generation: int
    host: PoolHandle | None = None  # of the host pool beside it


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How the next token is drawn. The defaults are greedy, with every limit off.

    Applied in this order: logit_bias, repetition, frequency and presence penalty, no
    stop token before min_tokens, grammar; then temperature and the limits. Penalties
    count the tokens generated so far, the repetition penalty those of the prompt too.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # by token id
    min_tokens: int = 0  # generated ones before which no stop token is drawn
    stop_token_ids: tuple[int, ...] = ()  # that end the answer, the model's own among them
    grammar: str = ""  # llguidance's form; empty: any text
    seed: int = 0
    sequence_index: int = 0
    return_logprob: bool = False
    return_prompt_logprobs: bool = False
    num_top_logprobs: int = 0  # beside the token's own, wherever logprobs are returned
    num_candidates: int = 0  # above 0: nothing is drawn, the likeliest are returned


@dataclass(frozen=True, slots=True)
class SequenceState:
    """All that compute must know of a sequence; replaces what it knew before."""

    sequence_id: str
    token_ids: Sequence[int]
    block_ids: Sequence[int]
    sampling: SamplingOptions
    num_prompt_tokens: int = 0  # those before the first generated one


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


class Chunk(NamedTuple):
    """Tokens [start, start + num_tokens) of a sequence; `sample` draws the one after them.

    `token_ids` are appended to the known tokens first. The last `num_drafts` tokens of
    the chunk are guesses: the step draws the token at each of their places and keeps
    what it drew up to the first that differs, and one more; the guesses behind are cut.
    With `num_drafts` and without `token_ids` the draft model makes them.
    """

    sequence_id: str
    start: int
    num_tokens: int
    sample: bool
    token_ids: Sequence[int] = ()
    num_drafts: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One forward over one batch; fields are applied in their order."""

    step_id: int
    closed: Sequence[str] = ()
    sequences: Sequence[SequenceState] = ()
    extensions: Sequence[TableExtension] = ()
    copies: Sequence[BlockCopy] = ()
    chunks: Sequence[Chunk] = ()


class TokenLogprob(NamedTuple):
    token_id: int
    logprob: float


class SampledToken(NamedTuple):
    """`top`: the likeliest tokens, best first, the lower id among equals."""

    sequence_id: str
    token_id: int
    logprob: float | None = None
    top: Sequence[TokenLogprob] = ()


class Candidates(NamedTuple):
    """The likeliest next tokens of a sequence that draws none, best first."""

    sequence_id: str
    tokens: Sequence[TokenLogprob]


class PromptLogprobs(NamedTuple):
    """Of the prompt tokens from position `start`, at least 1, on."""

    sequence_id: str
    start: int
    tokens: Sequence[SampledToken]


class SequenceFailure(NamedTuple):
    """A sequence that the step could not go on with; nothing was appended to it."""

    sequence_id: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens in the order of the chunks that sample. `elapsed` in seconds."""

    step_id: int
    tokens: list[SampledToken] = field(default_factory=list)
    elapsed: float = 0.0
    copy_elapsed: float = 0.0  # of that
    candidates: Sequence[Candidates] = ()
    prompt_logprobs: Sequence[PromptLogprobs] = ()
    failures: Sequence[SequenceFailure] = ()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    model_id: str
    fingerprint: bytes
    vocab_size: int
    max_sequence_length: int
    kv_shape: KvShape
    has_draft_model: bool = False
