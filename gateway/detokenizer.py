"""Token ids into text, piece by piece, never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol


class TokenBytes(Protocol):
    """What a detokenizer must know of a vocabulary."""

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes a token stands for; none for a special token or an unused id."""

    @property
    def strips_first_space(self) -> bool:
        """Whether one space at the very start of a text belongs to the tokenizer."""


class Detokenizer:
    """Turns one sequence's tokens into text as they come, in O(1) per token.

    Holds back only the bytes of an unfinished character, three at most. Bytes that
    can never become a character come out as U+FFFD, one per maximal invalid part,
    so the pieces joined are `decode` of all tokens.
    """

    def __init__(self, vocabulary: TokenBytes) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = vocabulary.strips_first_space

    def push(self, token_id: int) -> str:
        """The text that this token completes; often all of its own."""
        return self._clean(self._decoder.decode(self._vocabulary.bytes_of(token_id)))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, else nothing."""
        return self._clean(self._decoder.decode(b"", final=True))

    def _clean(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


def decode(vocabulary: TokenBytes, token_ids: Iterable[int]) -> str:
    """The text of all tokens at once."""
    detokenizer = Detokenizer(vocabulary)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    return "".join(pieces) + detokenizer.flush()
