"""Managers that die on purpose, and what they leave behind."""

from __future__ import annotations

from kvstore.fakes import FakeStorage


class Killed(BaseException):
    """The process is gone. Nothing that catches errors of ours may catch this one."""


class Fuse:
    """What a manager calls at its kill points: it dies at the one that is `left` to reach.

    `points` are those that it has come past since `light`, the last one being fatal.
    """

    def __init__(self) -> None:
        self.left = 0
        self.points: list[str] = []

    def light(self, left: int = 0) -> None:
        """Die at the `left`-th kill point from now on; 0: never."""
        self.left, self.points = left, []

    def __call__(self, point: str) -> None:
        self.points.append(point)
        if len(self.points) == self.left:
            raise Killed(point)


def copy_of(storage: FakeStorage) -> FakeStorage:
    """The same leftovers once more."""
    copy = FakeStorage()
    if storage.made:
        made = storage.made[-1]
        num_host_blocks = made.num_host_blocks
        memory = copy.create(made.layout, num_host_blocks, len(made.frame_records))
        memory.frame_records[:] = made.frame_records
        memory.journal.kept = list(made.journal.kept)
        memory.num_closes = made.num_closes
    return copy
