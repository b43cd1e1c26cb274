"""What applications ask for and what they get, in builtin types."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NamedTuple

from gateway.ports import SamplingOptions, TokenLogprob


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class EarlyStopping(Enum):
    """When a beam search ends, as in transformers.

    NO: no running beam is likely to beat the worst result, by what they have now.
    YES: there are as many results as beams. NEVER: no running beam can still beat it.
    """

    NO = "no"
    YES = "yes"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """Search for the likeliest texts instead of drawing; a score is a sum of
    log-probabilities over the number of tokens to the power of `length_penalty`."""

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.NO


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for `n` continuations of `prompt_ids`.

    max_tokens None means: as many as the model's length and the pool allow.
    best_of of them are generated and the n likeliest returned, by mean log-probability;
    None: n. Of equal ones that wait, the lowest `priority` number goes first.
    `sampling.stop_token_ids` are those that the client named; the engine adds the
    model's own unless `ignore_eos`, and sets `sampling.sequence_index`. `echo_stop`: the
    stop string or token that ended the answer is part of its text.
    `salt` keeps its KV apart from that of requests with another one.
    `log_id` is what the logs of all services call it; empty: its request_id. Unlike
    that, it comes from the client and need not be unique.
    """

    request_id: str
    prompt_ids: list[int]
    max_tokens: int | None = None
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    n: int = 1
    best_of: int | None = None
    beams: BeamOptions | None = None
    stop: tuple[str, ...] = ()
    echo_stop: bool = False
    ignore_eos: bool = False
    priority: int = 0
    tenant: str = ""
    salt: str = ""
    log_id: str = ""

    @property
    def num_sequences(self) -> int:
        """Most sequences that run for it at once."""
        if self.beams is not None:
            return self.beams.num_beams
        return self.best_of or self.n


@dataclass(frozen=True, slots=True)
class Started:
    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int


class ScoredToken(NamedTuple):
    """A token, its log-probability, and the likeliest ones in its place, best first."""

    token_id: int
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of the prompt's tokens from the second on; once, before any Delta."""

    tokens: list[ScoredToken]


@dataclass(frozen=True, slots=True)
class Delta:
    """Final text (whole characters only, may be empty) and the tokens since the last delta.

    `logprobs`: one for each of `token_ids` if asked for, else none. `index` is that of
    the continuation.
    """

    text: str
    token_ids: list[int]
    logprobs: list[ScoredToken]
    index: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """A continuation's end; there is one for each.

    `stop`: the stop string or the id of the stop token that ended it; None: the model's
    own, or another reason. `score` is that of a beam search.
    """

    reason: FinishReason
    num_completion_tokens: int
    index: int = 0
    stop: str | int | None = None
    score: float | None = None


GenerationEvent = Started | PromptScored | Delta | Finished
