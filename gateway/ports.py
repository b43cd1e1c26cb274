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
    has_draft_model: bool = False


# --- the page manager -------------------------------------------------------


class BlockCopy(NamedTuple):
    """Ids from the pool's number of blocks on are those of the host pool."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class OpenPlan:
    """`request_id` is for the log only. What a resumption finds is not counted as a hit.

    Neighbours of one group are opened together or not at all. Suspending or resuming a
    sequence does the same to all of its group.
    """

    sequence_id: str
    token_ids: Sequence[int]
    namespace: Namespace
    request_id: str = ""
    is_resumption: bool = False
    group_id: str = ""


@dataclass(frozen=True, slots=True)
class OpenedSequence:
    """The KV of `num_cached_tokens` leading tokens is there once `copies` were run.

    They are fewer than the prompt has.
    """

    sequence_id: str
    block_ids: list[int]
    num_cached_tokens: int
    copies: Sequence[BlockCopy] = ()


class ForkPlan(NamedTuple):
    """A second sequence with the first `length` tokens of a source, and its blocks.

    Its tokens are those that the page manager knows of the source.
    """

    sequence_id: str
    source_id: str
    length: int


class TruncatePlan(NamedTuple):
    """Keep the first `length` tokens and their slots."""

    sequence_id: str
    length: int


class ExtendPlan(NamedTuple):
    """Make room for `length` tokens in all."""

    sequence_id: str
    length: int


@dataclass(frozen=True, slots=True)
class ForkedSequence:
    """The KV of `num_computed_tokens` leading tokens is in these blocks, which are shared."""

    sequence_id: str
    block_ids: list[int]
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class ExtendedSequence:
    """Blocks `block_ids` now stand in the table from index `first_index` on.

    The first of them may replace one that is shared, and then be its copy.
    """

    sequence_id: str
    first_index: int
    block_ids: list[int]
    copies: Sequence[BlockCopy] = ()


@dataclass(frozen=True, slots=True)
class SuspendedSequence:
    """It is off the page pool, and holds `num_freed_blocks` fewer than before, shared ones
    not counted. `is_swapped`: its KV was kept in the host pool."""

    sequence_id: str
    num_freed_blocks: int
    is_swapped: bool


@dataclass(frozen=True, slots=True)
class ResumedSequence:
    """It is back with slots for all tokens that the page manager knows, of which the KV
    of the first `num_computed_tokens` is there once `copies` were run."""

    sequence_id: str
    block_ids: list[int]
    num_computed_tokens: int
    copies: Sequence[BlockCopy] = ()


class CommitPlan(NamedTuple):
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

    `resumes`, of one sequence for each group, and `opens` stop at the first that finds no
    room, so that none overtakes another, and find none if fewer than `num_spare_blocks`
    would stay available. The copies of transfers up to `completed_transfer` were run, in
    `copy_seconds`; computing `num_prefill_tokens` prompt tokens took `prefill_seconds`.
    """

    commits: Sequence[CommitPlan] = ()
    forks: Sequence[ForkPlan] = ()
    closes: Sequence[str] = ()
    truncates: Sequence[TruncatePlan] = ()
    suspends: Sequence[str] = ()
    extends: Sequence[ExtendPlan] = ()
    resumes: Sequence[str] = ()
    opens: Sequence[OpenPlan] = ()
    num_spare_blocks: int = 0
    completed_transfer: int = 0
    copy_seconds: float = 0.0
    num_prefill_tokens: int = 0
    prefill_seconds: float = 0.0

    def __bool__(self) -> bool:
        changes = (
            self.commits,
            self.forks,
            self.closes,
            self.truncates,
            self.suspends,
            self.extends,
            self.resumes,
            self.opens,
        )
        return any(changes) or bool(self.completed_transfer)


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """`copies` are to be run before those of single sequences, and all before any write.

    `transfer`: what to tell the kvstore when they were; 0: nothing. `num_available_blocks`
    are free, or cached and may be evicted, after the update.
    """

    extended: list[ExtendedSequence]
    opened: list[OpenedSequence]
    refused: list[Refusal]
    copies: list[BlockCopy] = field(default_factory=list)
    transfer: int = 0
    forked: list[ForkedSequence] = field(default_factory=list)
    suspended: list[SuspendedSequence] = field(default_factory=list)
    resumed: list[ResumedSequence] = field(default_factory=list)
    num_available_blocks: int = 0


@dataclass(frozen=True, slots=True)
class PinPlan:
    """Keep the whole blocks of these tokens, whether they are there yet or not."""

    pin_id: str
    owner: str
    token_ids: Sequence[int]
    namespace: Namespace
    ttl_seconds: float


class KvStore(Protocol):
    """The page manager. Every call raises WorkerUnavailable when it is out of reach."""

    async def become_driver(self, driver_id: str) -> None:
        """Take over: what this or another driver has open is closed, and refused later."""

    async def update_sequences(self, update: Update) -> UpdateResult:
        """Apply one step's changes in a single call.

        WorkerUnavailable also if somebody else has become the driver since.
        """

    async def pin_prefix(self, plan: PinPlan) -> None:
        """Keep a prefix for a time; a repeat with the same id begins the time again.

        Raises PinRefused if there is no room for it.
        """

    async def unpin(self, pin_id: str) -> None:
        """End a pin. One that is not there is no error."""

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
    num_prompt_tokens: int = 0  # those before the first generated one


@dataclass(frozen=True, slots=True)
class TableExtension:
    """Blocks that stand in the table from `first_index` on; what was behind stays."""

    sequence_id: str
    first_index: int
    block_ids: Sequence[int]


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
    """Tokens in the order of the chunks that sample, one or several of each. In seconds."""

    step_id: int
    tokens: list[SampledToken]
    elapsed: float
    copy_elapsed: float = 0.0  # of that
    candidates: Sequence[Candidates] = ()
    prompt_logprobs: Sequence[PromptLogprobs] = ()
    failures: Sequence[SequenceFailure] = ()


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
