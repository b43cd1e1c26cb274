"""How many prompt tokens a step may take while others wait for their next token."""

from __future__ import annotations

_SMOOTHING = 0.2  # weight of the newest step
_FIRST_TOKENS = 32  # of prompts in a step whose cost nobody knows yet
_LEAST_TOKENS = 16  # prompts always go on; and what a step must have to say what they cost


class Pace:
    """Measures what steps cost, and bounds the next one's time.

    A step with decodes takes what decodes alone take, and so much for each prompt token.
    Until a prompt's tokens have been measured, a step takes few of them.
    """

    def __init__(self, target: float) -> None:
        """`target`: seconds that a step with decodes should take at most; 0: no bound."""
        self._target = target
        self._decode_seconds = 0.0
        self._token_seconds = 0.0

    def observe(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """A step had so many sequences that decode and so many tokens of prompts."""
        if not num_prompt_tokens:
            if num_decodes:
                self._decode_seconds = _blend(self._decode_seconds, seconds)
            return
        if num_prompt_tokens < _LEAST_TOKENS:
            return
        rest = seconds - (self._decode_seconds if num_decodes else 0.0)
        if rest > 0:
            each = rest / num_prompt_tokens
            # Up at once: a token costs more the longer the context before it.
            self._token_seconds = max(each, _blend(self._token_seconds, each))

    def allowance(self, num_decodes: int, budget: int) -> int:
        """Most prompt tokens of a step, at most `budget`."""
        if not (num_decodes and self._target):
            return budget
        if not self._token_seconds:
            return min(budget, _FIRST_TOKENS)
        spare = self._target - self._decode_seconds
        return min(budget, max(_LEAST_TOKENS, int(spare / self._token_seconds)))


def _blend(old: float, new: float) -> float:
    return new if old == 0.0 else old + _SMOOTHING * (new - old)
