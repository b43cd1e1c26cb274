"""What the sampler needs of a grammar."""

from __future__ import annotations

from typing import Protocol

import torch

from compute.errors import GrammarFailed


class GrammarState(Protocol):
    """Where a text is in a grammar."""

    def allowed(self) -> torch.Tensor:
        """Which tokens may come next, [V] bool.

        Raises GrammarFailed (compute.errors).
        """

    def advance(self, token_id: int) -> None:
        """The text goes on with this token.

        Raises GrammarFailed if it must not; the state is as before.
        """

    def go_back(self) -> None:
        """Take back the last `advance`."""


class Grammar(Protocol):
    """A grammar, at the beginning of a text. May still be compiled meanwhile."""

    def begin(self) -> GrammarState:
        """A state of its own. Waits for the compiler if it must.

        Raises GrammarFailed: there is no such grammar.
        """


class Grammars(Protocol):
    """Whoever compiles grammars."""

    def compile(self, text: str) -> Grammar:
        """A grammar in the library's own form. Returns at once."""

    def close(self) -> None:
        """Stop compiling. Grammars that were not ready fail."""


class NoGrammars:
    """Where there is no tokenizer to read grammars with, each of them fails."""

    def compile(self, text: str) -> Grammar:  # noqa: ARG002 - it makes no difference
        return _NoGrammar()

    def close(self) -> None:
        """There is nothing to stop."""


class _NoGrammar:
    def begin(self) -> GrammarState:
        raise GrammarFailed("the model has no tokenizer.json, which grammars need")
