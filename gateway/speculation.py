"""Guesses for the next tokens of sequences that decode, as long as they pay.

A guess is verified in the same step and costs no answer its tokens: what a step draws
depends on the seed and the position alone, so a guess is right if it is what would have
been drawn anyway. Guesses only change how many tokens a step yields.

Sources: Saxena 2023, prompt lookup decoding; Leviathan et al. 2023, arXiv:2211.17192.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gateway.ports import ModelInfo
from gateway.sequence import Sequence
from gateway.stats import SpeculationStats

_LONGEST_NGRAM = 4
_SHORTEST_NGRAM = 2
_SMOOTHING = 0.1  # weight of the newest verification
_RETRY_STEPS = 64  # decode steps until a method that did not pay is tried again
_LEAST_MEASURED = 4  # steps of a kind before their times are believed
_PLAIN_EVERY = 32  # one step in so many makes no guesses, to know what that takes


class SpeculationMethod(StrEnum):
    OFF = "off"
    NGRAM = "ngram"
    DRAFT = "draft"


class NgramIndex:
    """Where each short run of tokens last ended in a growing text.

    Adding a token is O(1), and so is finding what followed the text's present end the
    last time that it occurred.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._last_end: dict[tuple[int, ...], int] = {}  # of runs, except those at the end

    def follow(self, token_ids: list[int]) -> None:
        """Take in what is new; the text may only have grown."""
        tokens = self._tokens
        for token_id in token_ids[len(tokens) :]:
            end = len(tokens)
            for size in range(_SHORTEST_NGRAM, min(_LONGEST_NGRAM, end) + 1):
                self._last_end[tuple(tokens[end - size :])] = end
            tokens.append(token_id)

    def propose(self, num_tokens: int) -> tuple[int, ...]:
        """What followed the longest run that ends the text, the last time; at most so many."""
        tokens = self._tokens
        for size in range(min(_LONGEST_NGRAM, len(tokens)), _SHORTEST_NGRAM - 1, -1):
            end = self._last_end.get(tuple(tokens[-size:]))
            if end is not None:
                return tuple(tokens[end : end + num_tokens])
        return ()


@dataclass(slots=True)
class _Acceptance:
    """Of one sequence's guesses."""

    tokens_per_step: float = 2.0  # hopeful at first: one guess in each step is right
    num_steps_off: int = 0


class Speculator:
    """Makes guesses for sequences and learns from what came of them.

    It pays to guess for a sequence while the tokens it gains are worth more than the
    time that the guesses add to the step, for everyone in it. Both are measured: tokens a
    step per sequence, and seconds of steps with and without guesses at the batch's
    present size, by the share of its sequences that had any.
    """

    def __init__(self, method: SpeculationMethod, num_drafts: int) -> None:
        self.method = method
        self.is_able = True  # whoever is to make the guesses is there
        self._most_drafts = num_drafts if method is not SpeculationMethod.OFF else 0
        self._num_drafts = self._most_drafts
        self._indexes: dict[Sequence, NgramIndex] = {}
        self._acceptance: dict[Sequence, _Acceptance] = {}
        # By the batch's size, in powers of two, since that alone changes a step's time.
        self._times: dict[int, tuple[_Measured, _Measured]] = {}
        self._batch = 0
        self._num_steps = 0
        self._num_drafted = 0
        self._num_accepted = 0

    def attach(self, model: ModelInfo) -> None:
        """Guess for this model from now on. A draft model must be there to be used."""
        self.is_able = self.method is not SpeculationMethod.DRAFT or model.has_draft_model
        self._num_drafts = self._most_drafts if self.is_able else 0

    def num_ahead(self, sequence: Sequence) -> int:
        """Most guesses for it in the step after the next, which need slots."""
        if not self._num_drafts or sequence.group.beams is not None:
            return 0
        acceptance = self._acceptance.get(sequence)
        is_on = acceptance is None or acceptance.tokens_per_step > self._cost()
        return self._num_drafts if is_on else 0

    def guess(self, sequence: Sequence, limit: int) -> tuple[tuple[int, ...], int]:
        """Guesses for a sequence that decodes, at most `limit`, and how many they are.

        A draft model's guesses have a number alone: it makes them in the step.
        """
        limit = min(limit, self._num_drafts)
        if self._num_steps % _PLAIN_EVERY == _PLAIN_EVERY - 1:
            return (), 0
        if limit < 1 or sequence.group.beams is not None or not self._pays(sequence):
            return (), 0
        if self.method is SpeculationMethod.DRAFT:
            return (), limit
        index = self._indexes.get(sequence)
        if index is None:
            index = self._indexes[sequence] = NgramIndex()
        index.follow(sequence.token_ids)
        tokens = index.propose(limit)
        return tokens, len(tokens)

    def learn(self, sequence: Sequence, num_drafts: int, num_tokens: int) -> None:
        """A step had so many guesses for it and yielded so many tokens."""
        acceptance = self._acceptance.setdefault(sequence, _Acceptance())
        acceptance.tokens_per_step += _SMOOTHING * (num_tokens - acceptance.tokens_per_step)
        self._num_drafted += num_drafts
        self._num_accepted += num_tokens - 1

    def observe(
        self, num_sequences: int, num_guessing: int, num_prompt_tokens: int, seconds: float
    ) -> None:
        """What a step took in which so many of the sequences that decode had guesses."""
        self._num_steps += 1
        if num_sequences and self._num_drafts and not num_prompt_tokens:
            self._batch = num_sequences.bit_length()
            plain, guessed = self._times.setdefault(self._batch, (_Measured(), _Measured()))
            (guessed if num_guessing else plain).observe(num_sequences, num_guessing, seconds)

    def stats(self) -> SpeculationStats:
        return SpeculationStats(self._num_drafted, self._num_accepted)

    def forget(self, sequence: Sequence) -> None:
        self._indexes.pop(sequence, None)
        self._acceptance.pop(sequence, None)

    def _pays(self, sequence: Sequence) -> bool:
        acceptance = self._acceptance.get(sequence)
        if acceptance is None:
            return True
        if acceptance.tokens_per_step > self._cost():
            acceptance.num_steps_off = 0
            return True
        acceptance.num_steps_off += 1
        if acceptance.num_steps_off >= _RETRY_STEPS:
            # The text may have changed its character, or the load.
            acceptance.num_steps_off = 0
            acceptance.tokens_per_step = self._cost() + 0.01
            return True
        return False

    def _cost(self) -> float:
        """Tokens that a sequence with guesses must yield in a step to be worth them.

        What a step with guesses takes longer is put down to the sequences that had them,
        in the tokens that the whole batch would have had in that time.
        """
        plain, guessed = self._times.get(self._batch, (_Measured(), _Measured()))
        is_known = min(plain.num_steps, guessed.num_steps) >= _LEAST_MEASURED
        if not (is_known and plain.seconds):
            return 1.1  # something must be gained
        return max(1.02, 1 + (guessed.seconds / plain.seconds - 1) / guessed.share)


@dataclass(slots=True)
class _Measured:
    """Decode steps of a kind, smoothed: seconds per sequence, share that had guesses."""

    seconds: float = 0.0
    share: float = 0.0
    num_steps: int = 0

    def observe(self, num_sequences: int, num_guessing: int, seconds: float) -> None:
        self.num_steps += 1
        weight = max(_SMOOTHING, 1 / self.num_steps)
        self.seconds += weight * (seconds / num_sequences - self.seconds)
        self.share += weight * (num_guessing / num_sequences - self.share)
