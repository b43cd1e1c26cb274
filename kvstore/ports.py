"""What the page manager needs from outside: memory that others can map."""

from __future__ import annotations

from typing import Protocol


class PoolMemory(Protocol):
    """Memory of one page pool, released by `close` and by nothing a client does."""

    @property
    def name(self) -> str:
        """What a client opens to map it."""

    @property
    def offset_bytes(self) -> int:
        """Where the pool starts in what `name` opens."""

    def close(self) -> None:
        """Release the memory. Clients keep what they mapped. Safe to repeat."""


class PoolFactory(Protocol):
    def __call__(self, size_bytes: int) -> PoolMemory:
        """Memory of that size, all of it reserved.

        Raises NoRoomForPool (kvstore.errors), leaving nothing behind.
        """
