"""The sequences of one request, which are admitted, suspended and resumed together."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from enum import Enum, auto
from functools import total_ordering

from gateway.beam_search import BeamSearch
from gateway.ports import Namespace
from gateway.sequence import Sequence
from gateway.types import GenerationRequest


class Stage(Enum):
    """Where a group is.

        WAITING ─▶ OPENING ─▶ RUNNING ─▶ SUSPENDING ─▶ SUSPENDED ─▶ RESUMING ─▶ RUNNING

    OPENING, SUSPENDING and RESUMING last from an update to its answer. From everywhere
    to ENDED, and when the workers are lost to WAITING.
    """

    WAITING = auto()
    OPENING = auto()
    RUNNING = auto()
    SUSPENDING = auto()
    SUSPENDED = auto()
    RESUMING = auto()
    ENDED = auto()


@total_ordering
class SequenceGroup:
    """All sequences of one request.

    Ordered by `key`, which decides who goes first: the time of arrival, later by
    `ageing` seconds for each class of priority. So whoever has waited for longer than
    the difference of two classes is worth goes first, and nobody waits for ever.

    `sequences` are those that run: at first the leader, which computes the prompt; then
    all. One that has ended leaves the list when its blocks are given back.
    """

    def __init__(
        self,
        request: GenerationRequest,
        max_length: int,
        eos_ids: Collection[int],
        *,
        arrival: float = 0.0,
        number: int = 0,
        ageing: float = 10.0,
    ) -> None:
        """`max_length` counts prompt and answer. `number` breaks ties of arrival."""
        self.request = request
        self.max_length = max_length
        self.num_prompt_tokens = len(request.prompt_ids)
        self.arrival = arrival
        self.key = (arrival + request.priority * ageing, number)
        self.stage = Stage.WAITING
        self.id = ""  # of this opening, as the kvstore knows it
        self.num_losses = 0  # times that the workers were lost with it since its last token
        self.is_suspended = False  # the kvstore keeps it
        self.was_opened = False  # once, so that another opening is no new hit
        self.has_spread = request.num_sequences == 1  # the leader has been forked
        stops = set(request.sampling.stop_token_ids)
        self.stop_ids = frozenset(stops if request.ignore_eos else stops.union(eos_ids))
        self.beams: BeamSearch | None = None
        if request.beams is not None:
            self.beams = BeamSearch(
                request.beams, self.stop_ids, max_length - self.num_prompt_tokens
            )
        self.sequences = [self.new_sequence(0, list(request.prompt_ids))]
        if self.num_prompt_tokens == 1 and not (self.has_spread or self.beams):
            # Nothing of the prompt could be shared: the last token is each one's own.
            self.has_spread = True
            self.sequences += [
                self.new_sequence(index, list(request.prompt_ids))
                for index in range(1, request.num_sequences)
            ]

    def __lt__(self, other: SequenceGroup) -> bool:
        return self.key < other.key

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    @property
    def is_ended(self) -> bool:
        return self.stage is Stage.ENDED

    @property
    def log_id(self) -> str:
        return self.request.log_id or self.request.request_id

    @property
    def width(self) -> int:
        """Sequences that it may run at once; a place is kept for each."""
        return self.request.num_sequences

    def namespace(self, fingerprint: bytes) -> Namespace:
        request = self.request
        return Namespace(fingerprint, tenant=request.tenant, salt=request.salt)

    def new_sequence(self, index: int, token_ids: list[int]) -> Sequence:
        """Another of its sequences, which is not among them yet."""
        request = self.request
        asked = request.sampling
        is_ranked = request.best_of is not None and request.best_of > request.n
        sampling = dataclasses.replace(
            asked,
            sequence_index=index,
            stop_token_ids=tuple(sorted(self.stop_ids)),
            return_logprob=asked.return_logprob or is_ranked,
            return_prompt_logprobs=asked.return_prompt_logprobs and index == 0,
            num_candidates=self.beams.num_candidates if self.beams else 0,
        )
        return Sequence(self, index, token_ids, sampling)

    @property
    def can_step(self) -> bool:
        """Beams go on together: each has slots for all of its tokens."""
        if self.beams is None:
            return True
        return all(s.block_ids and s.length >= len(s.token_ids) for s in self.sequences)

    @property
    def is_level(self) -> bool:
        """Each sequence lacks the KV of its last token alone."""
        return all(sequence.num_pending == 1 for sequence in self.sequences)

    @property
    def num_lost_tokens(self) -> int:
        """Tokens that would have to be computed again if it were suspended.

        What its sequences share is counted once.
        """
        num_shared = self.num_prompt_tokens * (len(self.sequences) - 1)
        return max(0, sum(s.num_computed for s in self.sequences) - num_shared)
