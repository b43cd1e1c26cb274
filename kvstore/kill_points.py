"""Where a test may kill the process: before and after every change that outlives it."""

from __future__ import annotations

from collections.abc import Callable

Reached = Callable[[str], None]

# Changes of frame records, and the records of the journal (kvstore.journal).
CHANGES = (
    "frames.take",
    "frames.remember",
    "frames.forget",
    "journal.sequences",
    "journal.fork",
    "journal.extend",
    "journal.commit",
    "journal.truncate",
    "journal.close",
    "journal.namespace",
    "journal.pin",
    "journal.unpin",
    "journal.epoch",
    "journal.rewrite",
)
KILL_POINTS = tuple(f"{change}.{moment}" for change in CHANGES for moment in ("before", "after"))


def ignore(point: str) -> None:
    """Nothing happens at a kill point, outside of tests."""
