"""What the page manager needs from outside: memory that others can map, and that stays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kvstore.types import PoolLayout


class JournalFile(Protocol):
    """Records in the order of their appending."""

    def append(self, record: bytes) -> bool:
        """Add a record. It is there, whole, once this returns; half of one never is.

        False if there was no room: then the journal is empty until it is replaced.
        """

    def records(self) -> Iterable[bytes]:
        """All records; a half-written one at the end is left out."""

    def replace(self, records: Iterable[bytes]) -> int:
        """Have these records instead, all of them or the present ones; bytes of them."""


class PoolMemory(Protocol):
    """Memory of one page pool, released by `close` and by nothing a client does.

    What belongs to it: a host pool (None if it has no blocks), the frame records, zeros at
    first, and a journal.
    """

    @property
    def name(self) -> str:
        """What a client opens to map it."""

    @property
    def offset_bytes(self) -> int:
        """Where the pool starts in what `name` opens."""

    @property
    def host_name(self) -> str | None:
        """What a client opens to map the host pool."""

    @property
    def frame_records(self) -> memoryview:
        """Writable, of the size that was asked for."""

    @property
    def journal(self) -> JournalFile: ...

    def touch(self) -> None:
        """Say that the pool is in use."""

    def leave(self) -> None:
        """Give the memory up without releasing it: it is there to be recovered."""

    def close(self) -> None:
        """Release the memory. Clients keep what they mapped. Safe to repeat."""


class PoolStorage(Protocol):
    """Where pools are made, and found again by the next process."""

    def create(self, layout: PoolLayout, num_host_blocks: int, records_bytes: int) -> PoolMemory:
        """Memory of that size, all of it reserved.

        Raises NoRoomForPool (kvstore.errors), leaving nothing behind.
        """

    def recover(self) -> PoolMemory | None:
        """The pool of a process that is gone, if there is one; nobody else gets it then."""
