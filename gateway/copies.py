"""Block copies that the kvstore asked for, on their way through a step."""

from __future__ import annotations

from gateway.ports import BlockCopy, UpdateResult


class CopyQueue:
    """Copies in the order in which the kvstore named them, until a step has run them.

    They go with the next step there is, before anything is written: no block that came
    with them, or later, may be written to earlier. A transfer is done when the step that
    took its last copy has ended.
    """

    def __init__(self) -> None:
        self._waiting: list[BlockCopy] = []
        self._transfer = 0  # of the last one that waits; 0: none
        self._running = 0  # of the last one that the step under way has taken
        self._done = 0  # of the last one that the kvstore must be told of
        self._done_seconds = 0.0

    def add(self, result: UpdateResult) -> None:
        """What an update's answer asks for."""
        self._waiting += result.copies
        for extended in result.extended:
            self._waiting += extended.copies
        for resumed in result.resumed:
            self._waiting += resumed.copies
        for opened in result.opened:
            self._waiting += opened.copies
        self._transfer = max(self._transfer, result.transfer)

    def start_step(self) -> list[BlockCopy]:
        """All that wait, for a step that is sent now."""
        copies, self._waiting = self._waiting, []
        self._running, self._transfer = self._transfer, 0
        return copies

    def end_step(self, seconds: float) -> None:
        """The step that was sent last has run its copies, in so much time."""
        if self._running:
            self._done, self._running = self._running, 0
            self._done_seconds += seconds

    def take_done(self) -> tuple[int, float]:
        """The last transfer that is done and was not told of, and its copies' time."""
        done = (self._done, self._done_seconds)
        self._done, self._done_seconds = 0, 0.0
        return done
