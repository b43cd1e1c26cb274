"""Blocks that several resumed sequences have in their tables before their KV is there.

What sequences had in common when they were suspended they have in common when they are
back, even if it must be computed again: one of them computes it, the others wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from gateway.sequence import Sequence


class SharedBlocks:
    """Who may compute, so that no block is computed by two at once.

    Invariant: a sequence that waits has a list of the shared blocks that it lacks, in the
    order of its table; they begin where its KV ends.
    """

    def __init__(self) -> None:
        self._block_size = 1
        self._lacking: dict[Sequence, list[int]] = {}  # block ids
        self._claimed: set[int] = set()  # in the step that is being filled

    def add(self, resumed: Iterable[Sequence], block_size: int) -> None:
        """These came back together."""
        self._block_size = block_size
        lacking = {s: s.block_ids[s.num_computed // block_size :] for s in resumed}
        counts = Counter(block_id for block_ids in lacking.values() for block_id in block_ids)
        for sequence, block_ids in lacking.items():
            shared = [block_id for block_id in block_ids if counts[block_id] > 1]
            if shared:
                self._lacking[sequence] = shared

    def start_step(self) -> None:
        self._claimed.clear()

    def claim(self, sequence: Sequence) -> bool:
        """Whether it may compute in this step, with what it lacks claimed for it."""
        lacking = self._lacking.get(sequence, ())
        if self._claimed.intersection(lacking):
            return False
        self._claimed.update(lacking)
        return True

    def end_step(self) -> None:
        """What one sequence has computed, all have that share it."""
        if not self._lacking:
            return
        size = self._block_size
        present: set[int] = set()
        for sequence, block_ids in self._lacking.items():
            computed = sequence.block_ids[: sequence.num_computed // size]
            present.update(block_ids[: len(set(computed).intersection(block_ids))])
        for sequence, block_ids in list(self._lacking.items()):
            while block_ids and block_ids[0] in present:
                end = (sequence.block_ids.index(block_ids.pop(0)) + 1) * size
                sequence.num_computed = max(sequence.num_computed, end)
            if not block_ids:
                del self._lacking[sequence]

    def forget(self, sequence: Sequence) -> None:
        """It ends or is suspended. Whoever waited for it goes on by itself."""
        self._lacking.pop(sequence, None)

    def clear(self) -> None:
        self._lacking.clear()
