"""How much of a prompt's end does not come back when the rest of it does."""

from __future__ import annotations

_SIZES = 12
_EVIDENCE = 8.0
_MOST_COUNTED = 1024.0


class Tails:
    """Learns from returns how many blocks at the end are usually left over.

    A prompt that goes on replaces its last tokens where the chat template or the tokenizer
    joins things differently; a trace whose blocks are large always ends in a partial one.
    `size` is the largest power of two that more than half of all returns left over, or 0;
    `share` is the part of them that did come back.
    """

    def __init__(self) -> None:
        self._num_returns = 0.0
        self._num_left = [0.0] * _SIZES  # at least 2 ** index blocks were left over
        self.size = 0
        self.share = 1.0

    def learn(self, num_left: int) -> None:
        """A prompt came back and left this many blocks over."""
        self._num_returns += 1
        for index in range(min(_SIZES, num_left.bit_length())):
            self._num_left[index] += 1
        if self._num_returns >= _MOST_COUNTED:  # so that a change is noticed
            self._num_returns /= 2
            self._num_left = [count / 2 for count in self._num_left]
        self.size, self.share = 0, 1.0
        for index, count in enumerate(self._num_left):
            part = count / (self._num_returns + _EVIDENCE)
            if part > 1 / 2:
                self.size, self.share = 2**index, 1 - part
