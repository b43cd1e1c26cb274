"""How often a sequence has each token, kept as it grows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


class TokenCounts:
    """The tokens that a sequence has met, each with how often it was generated.

    Invariant: the first `n` entries of the arrays are of different tokens, in the order in
    which they were met. Those of the prompt come first; a generated one that was removed
    again stays with a count of 0, and does not count as met.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._ids = np.unique(np.asarray(prompt, dtype=np.int64))
        self._num_prompt = self._size = len(self._ids)
        self._counts = np.zeros(self._size, dtype=np.float32)
        self._places = {token_id: n for n, token_id in enumerate(self._ids.tolist())}

    def add(self, token_id: int) -> None:
        """One more of this token was generated."""
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = self._size
            if place == len(self._ids):
                grown = max(16, 2 * place)
                self._ids = np.resize(self._ids, grown)
                self._counts = np.resize(self._counts, grown)
            self._ids[place], self._counts[place] = token_id, 0
            self._size += 1
        self._counts[place] += 1

    def remove(self, token_id: int) -> None:
        """Take back one `add`."""
        self._counts[self._places[token_id]] -= 1

    def met(self) -> torch.Tensor:
        """Ids [n] int64 of the tokens in the prompt and of those generated."""
        ids, counts = self._ids[: self._size], self._counts[: self._size]
        is_met = counts > 0
        is_met[: self._num_prompt] = True
        return torch.from_numpy(ids[is_met])

    def generated(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids [n] int64 of the generated tokens, and how often each was [n] fp32."""
        ids, counts = self._ids[: self._size], self._counts[: self._size]
        is_generated = counts > 0
        return torch.from_numpy(ids[is_generated]), torch.from_numpy(counts[is_generated])
