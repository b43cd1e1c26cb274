"""What the gateway needs from outside: a page manager and a step runner.

Both may be processes behind gRPC or objects in this process; `services/` has both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class Namespace(NamedTuple):
    """What makes cached KV interchangeable. Parts are compared one by one, never joined."""

    model_fingerprint: bytes
    adapter: str = ""
    tenant: str = ""
    salt: str = ""


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
class PoolInfo:
    block_size: int
    num_blocks: int
    generation: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The loaded model. `max_sequence_length` counts prompt and answer together."""

    model_id: str
    fingerprint: bytes
    vocab_size: int
    max_sequence_length: int
    pool: PoolInfo


# --- the page manager -------------------------------------------------------


class BlockCopy(NamedTuple):
    """Ids from the pool's number of blocks on are those of the host pool."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class OpenPlan:
    """`request_id` is for the log only. What a resumption finds is not counted as a hit."""

    sequence_id: str
    token_ids: Sequence[int]
    namespace: Namespace
    request_id: str = ""
    is_resumption: bool = False


@dataclass(frozen=True, slots=True)
class OpenedSequence:
    """The KV of `num_cached_tokens` leading tokens is there once `copies` were run.

    They are fewer than the prompt has.
    """

    sequence_id: str
    block_ids: list[int]
    num_cached_tokens: int
    copies: Sequence[BlockCopy] = ()


@dataclass(frozen=True, slots=True)
class ExtendPlan:
    """Make room for `length` tokens in all."""

    sequence_id: str
    length: int


@dataclass(frozen=True, slots=True)
class ExtendedSequence:
    """Blocks `block_ids` now stand in the table from index `first_index` on."""

    sequence_id: str
    first_index: int
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class CommitPlan:
    """The KV of the first `num_computed_tokens` tokens has been written.

    `token_ids` are the tokens from position `token_start` on that the page manager
    may not know yet.
    """

    sequence_id: str
    num_computed_tokens: int
    token_start: int
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Refusal:
    sequence_id: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Update:
    """One step's changes, applied in the order of the fields, each entry on its own.

    `opens` stop at the first that finds no room, so that none overtakes another. The
    copies of transfers up to `completed_transfer` were run, in `copy_seconds`; computing
    `num_prefill_tokens` prompt tokens took `prefill_seconds`.
    """

    commits: Sequence[CommitPlan] = ()
    closes: Sequence[str] = ()
    extends: Sequence[ExtendPlan] = ()
    opens: Sequence[OpenPlan] = ()
    completed_transfer: int = 0
    copy_seconds: float = 0.0
    num_prefill_tokens: int = 0
    prefill_seconds: float = 0.0

    def __bool__(self) -> bool:
        changes = (self.commits, self.closes, self.extends, self.opens)
        return any(changes) or bool(self.completed_transfer)


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """`copies` are to be run before those of single sequences, and all before any write.

    `transfer`: what to tell the kvstore when they were; 0: nothing.
    """

    extended: list[ExtendedSequence]
    opened: list[OpenedSequence]
    refused: list[Refusal]
    copies: list[BlockCopy] = field(default_factory=list)
    transfer: int = 0


class KvStore(Protocol):
    """The page manager. Every call raises WorkerUnavailable when it is out of reach."""

    async def become_driver(self, driver_id: str) -> None:
        """Take over: what this or another driver has open is closed, and refused later."""

    async def update_sequences(self, update: Update) -> UpdateResult:
        """Apply one step's changes in a single call.

        WorkerUnavailable also if somebody else has become the driver since.
        """

    async def resign(self) -> None:
        """Close all that is open. Another can take over without it."""

    async def close(self) -> None:
        """Give up the connection."""


# --- the step runner --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SequenceState:
    """All that compute must know of a sequence; replaces what it knew before.

    `request_id` is for the log only.
    """

    sequence_id: str
    token_ids: Sequence[int]
    block_ids: Sequence[int]
    sampling: SamplingOptions
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class TableExtension:
    sequence_id: str
    first_index: int
    block_ids: Sequence[int]


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
    """Tokens in the order of the chunks that sample. Times in seconds."""

    step_id: int
    tokens: list[SampledToken]
    elapsed: float
    copy_elapsed: float = 0.0  # of that


class StepStream(Protocol):
    """An open stream of steps. Sequence state on the other side lives as long as it."""

    async def submit(self, step: Step) -> None:
        """Send a step. Results come in the order of submission."""

    async def result(self) -> StepResult:
        """Wait for the next step's result.

        Raises:
            StepRefused: the step was not run; the stream goes on.
            WorkerUnavailable: the stream is broken; open another.
        """

    async def close(self) -> None:
        """End the stream; compute forgets its sequences. Safe to repeat."""


class Compute(Protocol):
    """The step runner. Every call raises WorkerUnavailable when it is out of reach."""

    async def get_model(self) -> ModelInfo:
        """Describe the loaded model and its pool. WorkerUnavailable while it loads."""

    async def open_stream(self) -> StepStream:
        """Become the driver: one stream at a time."""

    async def close(self) -> None:
        """Give up the connection."""
