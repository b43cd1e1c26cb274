"""Groups that wait to be opened or resumed, in the order of their keys."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from gateway.group import SequenceGroup


class WaitQueue:
    """A sorted list: short enough that inserting is cheap, and it can be walked in order."""

    def __init__(self) -> None:
        self._groups: list[SequenceGroup] = []

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SequenceGroup]:
        """In order. Not to be changed meanwhile."""
        return iter(self._groups)

    def add(self, group: SequenceGroup) -> None:
        bisect.insort(self._groups, group)

    def remove(self, group: SequenceGroup) -> None:
        """Raises ValueError if it does not wait."""
        index = bisect.bisect_left(self._groups, group)
        if index == len(self._groups) or self._groups[index] is not group:
            raise ValueError(f"{group.request.request_id} does not wait")
        del self._groups[index]
