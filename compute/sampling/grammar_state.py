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


class NoGrammar:
    """Stands for any grammar where there is no tokenizer to read it with."""

    def __init__(self, text: str) -> None:
        self.text = text

    def begin(self) -> GrammarState:
        raise GrammarFailed("the model has no tokenizer.json, which grammars need")
