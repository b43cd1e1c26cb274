"""Pool memory for tests and benchmarks: none, but with records that outlive a manager."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.ports import Exported
from kvstore.types import PoolLayout, PosixMemory


class FakeJournalFile:
    """A list of records."""

    def __init__(self) -> None:
        self.kept: list[bytes] = []

    def append(self, record: bytes) -> bool:
        self.kept.append(record)
        return True

    def records(self) -> list[bytes]:
        return list(self.kept)

    def replace(self, records: Iterable[bytes]) -> int:
        self.kept = list(records)
        return sum(map(len, self.kept))


class FakeMemory:
    """A pool in name only, in the middle of something else. Knows how often it was released."""

    def __init__(self, layout: PoolLayout, num_host_blocks: int, records_bytes: int) -> None:
        self.layout = layout
        self.num_host_blocks = num_host_blocks
        self.frame_records = memoryview(bytearray(records_bytes))
        self.journal = FakeJournalFile()
        self.num_closes = 0

    def export(self) -> Exported:
        return Exported(PosixMemory("quire-none"), 4096)

    def export_host(self) -> Exported | None:
        return Exported(PosixMemory("quire-none.host")) if self.num_host_blocks else None

    def touch(self) -> None:
        """Nobody would know."""

    def leave(self) -> None:
        """It stays as it is."""

    def close(self) -> None:
        self.num_closes += 1


class FakeStorage:
    """Gives the next manager what the last one left, unless that one has closed it."""

    def __init__(self, free_bytes: int = 0) -> None:
        self.made: list[FakeMemory] = []
        self._free_bytes = free_bytes

    def free_bytes(self) -> int:
        return self._free_bytes

    def create(self, layout: PoolLayout, num_host_blocks: int, records_bytes: int) -> FakeMemory:
        self.made.append(FakeMemory(layout, num_host_blocks, records_bytes))
        return self.made[-1]

    def recover(self) -> FakeMemory | None:
        if self.made and not self.made[-1].num_closes:
            return self.made[-1]
        return None
