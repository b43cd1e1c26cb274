"""What the page manager needs from outside: memory that others can map, and that stays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from kvstore.types import PoolLayout, SharedMemory


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


class Exported(NamedTuple):
    """What a client maps, and where in it the pool starts."""

    memory: SharedMemory
    offset_bytes: int = 0


class PoolMemory(Protocol):
    """Memory of one page pool, released by `close` and by nothing a client does.

    What belongs to it: a host pool (None if it has no blocks), the frame records, zeros at
    first, and a journal.
    """

    def export(self) -> Exported:
        """The pages, for clients. The same each time."""

    def export_host(self) -> Exported | None:
        """The host pool, for clients."""

    @property
    def frame_records(self) -> memoryview:
        """Writable, of the size that was asked for."""

    @property
    def journal(self) -> JournalFile: ...

    def touch(self) -> None:
        """Say that the pool is in use."""

    def leave(self) -> None:
        """Give the memory up without releasing it, if it can be there to be recovered."""

    def close(self) -> None:
        """Release the memory. Clients keep what they mapped. Safe to repeat."""


class PoolStorage(Protocol):
    """Where pools are made, and found again by the next process."""

    def create(self, layout: PoolLayout, num_host_blocks: int, records_bytes: int) -> PoolMemory:
        """Memory of that size, all of it reserved.

        Raises NoRoomForPool or CudaUnavailable (kvstore.errors), leaving nothing behind.
        """

    def free_bytes(self) -> int:
        """How large a pool could be now; of this, a share of memory is a share."""

    def recover(self) -> PoolMemory | None:
        """The pool of a process that is gone, if there is one; nobody else gets it then."""


class DeviceMemory(Protocol):
    """Memory of a device that clients can map. How they do is up to whoever made it."""

    def export(self) -> Exported:
        """The memory, for clients. The same each time."""

    def close(self) -> None:
        """Release it. Safe to repeat."""


class CudaError(Exception):
    """A call of CUDA that failed: its number and its name, such as cudaErrorInvalidValue."""

    def __init__(self, code: int, name: str, text: str = "") -> None:
        super().__init__(f"{name}: {text}" if text else name)
        self.code, self.name = code, name


OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


class CudaRuntime(Protocol):
    """As much of CUDA as a pool needs. Addresses are of device memory, sizes in bytes.

    Devices are numbered from 0, as far as this process sees them. Calls raise CudaError.
    """

    def device_count(self) -> int: ...

    def device_uuid(self, device: int) -> bytes:
        """16 bytes, the same in every process."""

    def memory_info(self, device: int) -> tuple[int, int]:
        """Bytes that are free now, and those that there are."""

    def malloc(self, device: int, size_bytes: int) -> int:
        """The address of new memory, with anything in it."""

    def clear(self, device: int, address: int, size_bytes: int) -> None:
        """Make it zeros, and wait until it is."""

    def free(self, device: int, address: int) -> None:
        """Give back what `malloc` gave."""

    def ipc_handle(self, device: int, address: int) -> bytes:
        """64 bytes with which other processes map what `malloc` gave."""
