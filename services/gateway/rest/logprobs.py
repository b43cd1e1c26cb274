"""Log-probabilities in the three JSON forms that clients know.

A token that is no whole characters is shown by its bytes; what is too unlikely for a
JSON number is shown as OpenAI shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gateway.detokenizer import Detokenizer
from gateway.ports import TokenLogprob
from gateway.types import ScoredToken

Json = dict[str, Any]
TokenBytes = Callable[[int], bytes]

_LEAST = -9999.0


def _finite(logprob: float) -> float:
    return logprob if logprob > _LEAST else _LEAST


def _shown(data: bytes, prefix: str = "") -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionLogprobs:
    """The form of /v1/completions, for one choice and piece by piece.

    Offsets count characters of the choice's text; a token that begins amid a character
    has that character's.
    """

    def __init__(self, token_bytes: TokenBytes, detokenizer: Detokenizer, num_top: int) -> None:
        self._token_bytes = token_bytes
        self._detokenizer = detokenizer
        self._num_top = num_top
        self._offset = 0

    def add_prompt(
        self,
        text: str,
        token_ids: Sequence[int],
        scores: Sequence[ScoredToken],
        detokenizer: Detokenizer,
    ) -> Json:
        """A prompt that is shown as `text`; nothing is known of its first token."""
        first = self._name(token_ids[0])
        shown: Json = {
            "tokens": [first, *(self._name(one.token_id) for one in scores)],
            "token_logprobs": [None, *(_finite(one.logprob) for one in scores)],
            "top_logprobs": [None, *map(self._top, scores)],
            "text_offset": [],
        }
        for token_id in token_ids:
            shown["text_offset"].append(self._offset)
            self._offset += len(detokenizer.push(token_id))
            # A special token is text only where the prompt has its name.
            name = self._token_bytes(token_id).decode(errors="replace")
            if name and shown["text_offset"][-1] == self._offset:
                is_shown = text.startswith(name, self._offset)
                self._offset += len(name) if is_shown else 0
        self._offset = len(text)
        return shown

    def add(self, scores: Sequence[ScoredToken]) -> Json:
        """The next tokens of the answer."""
        offsets = []
        for one in scores:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push(one.token_id))
        return {
            "tokens": [self._name(one.token_id) for one in scores],
            "token_logprobs": [_finite(one.logprob) for one in scores],
            "top_logprobs": [self._top(one) for one in scores],
            "text_offset": offsets,
        }

    def _name(self, token_id: int) -> str:
        return _shown(self._token_bytes(token_id), "bytes:")

    def _top(self, scored: ScoredToken) -> dict[str, float]:
        """The likeliest and the token itself; of those with one name, the likeliest."""
        found: dict[str, float] = {}
        for token_id, logprob in (*scored.top[: self._num_top], scored[:2]):
            found.setdefault(self._name(token_id), _finite(logprob))
        return found


def chat_logprobs(scores: Sequence[ScoredToken], num_top: int, token_bytes: TokenBytes) -> Json:
    """The form of /v1/chat/completions."""

    def one(token_id: int, logprob: float) -> Json:
        data = token_bytes(token_id)
        return {"token": _shown(data), "logprob": _finite(logprob), "bytes": list(data)}

    content = [
        one(scored.token_id, scored.logprob)
        | {"top_logprobs": [one(*likely) for likely in scored.top[:num_top]]}
        for scored in scores
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    scores: Sequence[ScoredToken], num_top: int, token_bytes: TokenBytes
) -> list[Json | None]:
    """vLLM's form for prompts: by token id, null for the first token.

    The rank of a token that is not among those reported is null.
    """

    def one(likely: TokenLogprob, rank: int | None) -> tuple[str, Json]:
        name = token_bytes(likely.token_id).decode(errors="replace")
        logprob = _finite(likely.logprob)
        return str(likely.token_id), {"logprob": logprob, "rank": rank, "decoded_token": name}

    shown: list[Json | None] = [None]
    for scored in scores:
        own = TokenLogprob(scored.token_id, scored.logprob)
        ranks = {likely.token_id: rank for rank, likely in enumerate(scored.top, start=1)}
        entries = dict([one(own, ranks.get(own.token_id))])
        entries |= dict(one(likely, ranks[likely.token_id]) for likely in scored.top[:num_top])
        shown.append(entries)
    return shown
