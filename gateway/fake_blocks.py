"""The blocks and sequences of the fake page manager: who holds what, and what can be found."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gateway.ports import Namespace

Key = tuple[Namespace, tuple[int, ...]]  # all tokens up to the end of a full block


class NoRoom(Exception):
    """Too few blocks are free. Nothing changed."""


@dataclass(slots=True)
class FakeSequence:
    """A sequence. While it is suspended it has no blocks, but perhaps `host_ids`."""

    sequence_id: str
    token_ids: list[int]
    namespace: Namespace
    group_id: str
    block_ids: list[int]
    length: int
    num_computed: int
    is_suspended: bool = False
    host_ids: list[int] = field(default_factory=list)  # of its first blocks, until it commits
    transfer: int = 0  # that brings its KV there

    @property
    def num_findable(self) -> int:
        """Tokens that may be there already when it comes back: one is left to compute."""
        return max(self.num_computed, len(self.token_ids) - 1)


class FakeBlocks:
    """Reference counts, a list of free blocks and a dict of prefixes.

    Free blocks can be found until they are taken. Those that are late are held by nobody
    and not free yet.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free = deque(range(num_blocks))
        self.late: dict[int, int] = {}  # what is missing until a block is free, in ticks
        self._ref_counts = [0] * num_blocks
        self._cached: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}

    def num_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def key(self, namespace: Namespace, token_ids: Sequence[int], index: int) -> Key:
        """The identity of a full block."""
        return namespace, tuple(token_ids[: (index + 1) * self.block_size])

    def find(self, namespace: Namespace, token_ids: Sequence[int]) -> list[int]:
        """The blocks of the longest cached prefix."""
        hits: list[int] = []
        for index in range(len(token_ids) // self.block_size):
            block_id = self._cached.get(self.key(namespace, token_ids, index))
            if block_id is None:
                break
            hits.append(block_id)
        return hits

    def remember(self, block_id: int, key: Key) -> None:
        """The block has this prefix, unless another one had it first."""
        if key not in self._cached and block_id not in self._key_of:
            self._cached[key] = block_id
            self._key_of[block_id] = key

    def is_shared(self, block_id: int) -> bool:
        """Others read it, or may find it."""
        return self._ref_counts[block_id] > 1 or block_id in self._key_of

    def check_room(
        self, num_new: int, hits: Iterable[Sequence[int]] = (), num_spare: int = 0
    ) -> None:
        """Whether so many can be taken beside the hits, and how many must stay."""
        idle = {b for table in hits for b in table if not self._ref_counts[b]} - self.late.keys()
        if num_new + len(idle) + num_spare > len(self.free):
            raise NoRoom

    def hold(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if not self._ref_counts[block_id] and self.late.pop(block_id, None) is None:
                self.free.remove(block_id)
            self._ref_counts[block_id] += 1

    def take(self) -> int:
        block_id = self.free.popleft()
        self._ref_counts[block_id] = 1
        key = self._key_of.pop(block_id, None)
        if key is not None:
            del self._cached[key]
        return block_id

    def release(self, block_ids: Sequence[int], num_ticks: int = 0) -> None:
        """Let go of blocks, which are free so many ticks later if nobody holds them."""
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            if not self._ref_counts[block_id]:
                self.late[block_id] = num_ticks
        self.tick(0)

    def tick(self, num_ticks: int = 1) -> None:
        for block_id in list(self.late):
            self.late[block_id] -= num_ticks
            if self.late[block_id] <= 0:
                del self.late[block_id]
                self.free.append(block_id)
