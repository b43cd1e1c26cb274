"""Whom to suspend when there is no room, and when to wait for room instead.

A shortage is a sequence that was refused the slots it needs now. Suspending a group
frees blocks, but how many only the kvstore knows, and perhaps not at once. So one victim
at a time: another follows only if what the last one gave has come and was not enough, or
does not come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.group import SequenceGroup

# Answers of the kvstore that promised blocks are waited for.
_PATIENCE = 4


@dataclass(slots=True)
class Preemption:
    """What victims and others that left gave, as far as it has not been used."""

    num_promised: int = 0  # blocks
    patience: int = 0  # answers

    def promise(self, num_blocks: int) -> None:
        """A suspension or an end frees so many blocks, now or soon."""
        self.num_promised += num_blocks
        self.patience = _PATIENCE

    def grant(self, num_blocks: int) -> None:
        """So many blocks were given out."""
        self.num_promised = max(0, self.num_promised - num_blocks)

    def answer(self) -> None:
        """The kvstore has answered."""
        self.patience -= 1
        if self.patience <= 0:
            self.num_promised = 0

    def is_needed(self, num_short: int) -> bool:
        """Whether to take a victim for so many sequences that need a block each."""
        return num_short > self.num_promised


def choose_victim(
    running: Sequence[SequenceGroup], *, ageing: float, tenant: str | None = None
) -> SequenceGroup | None:
    """Of the latest groups the one that loses least; the latest among equals.

    `running` is in order. The latest are those whose keys are within `ageing` of the
    last one's: whom priority and age tell apart is not weighed against each other. The
    first of all is never taken, so that it ends, and then the next. `tenant`: only its
    groups help; None: any does.
    """
    if tenant is None:
        others = running[1:]
    else:
        others = [group for group in running if group.request.tenant == tenant][1:]
    latest = [group for group in others if others and group.key[0] > others[-1].key[0] - ageing]
    best = None
    for group in latest:  # the last of equals wins
        if best is None or group.num_lost_tokens <= best.num_lost_tokens:
            best = group
    return best
