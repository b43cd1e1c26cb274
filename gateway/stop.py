"""Stop strings in streamed text, wherever the borders between pieces fall."""

from __future__ import annotations

from collections.abc import Sequence


class _Matcher:
    """Knuth, Morris and Pratt's automaton for one pattern.

    After each character `matched` is the length of the longest prefix of the
    pattern that ends the text so far.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0
        self._fallback = [0] * len(pattern)
        length = 0
        for i in range(1, len(pattern)):
            while length and pattern[i] != pattern[length]:
                length = self._fallback[length - 1]
            if pattern[i] == pattern[length]:
                length += 1
            self._fallback[i] = length

    def advance(self, character: str) -> bool:
        """Whether the pattern is complete now. Not to be advanced after that."""
        while self.matched and self.pattern[self.matched] != character:
            self.matched = self._fallback[self.matched - 1]
        if self.pattern[self.matched] == character:
            self.matched += 1
        return self.matched == len(self.pattern)


class StopFilter:
    """Lets text through up to the first stop string, and with `echo` that too.

    Holds back exactly the text that could still turn out to be none of the answer;
    with `echo` that is nothing. If several strings are complete at the same character
    the longest counts. `matched` is the one that ended the text.
    """

    def __init__(self, stops: Sequence[str], *, echo: bool = False) -> None:
        self._matchers = [_Matcher(stop) for stop in stops]
        self._echo = echo
        self._held = ""
        self.matched: str | None = None

    @property
    def is_stopped(self) -> bool:
        return self.matched is not None

    def push(self, text: str) -> str:
        """The text that is certain now. Empty once `is_stopped`."""
        if self.is_stopped:
            return ""
        if not self._matchers:
            return text
        for index, character in enumerate(text):
            complete = [m.pattern for m in self._matchers if m.advance(character)]
            if complete:
                self.matched = max(complete, key=len)
                whole = self._held + text[: index + 1]
                self._held = ""
                return whole if self._echo else whole[: len(whole) - len(self.matched)]
        if self._echo:
            return text
        whole = self._held + text
        cut = len(whole) - max(matcher.matched for matcher in self._matchers)
        self._held = whole[cut:]
        return whole[:cut]

    def flush(self) -> str:
        """At the end of the text: what was held back, since no stop string came of it."""
        held, self._held = self._held, ""
        return held
