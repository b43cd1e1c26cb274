"""What attaching a pool needs from outside: a way to map its memory, and CUDA.

Beside compute.ports, which those import that must not load torch.
"""

from __future__ import annotations

from typing import Protocol

import torch

from compute.types import PoolHandle


class MappedMemory(Protocol):
    """Memory of another process that we have mapped, until no view of it is left."""

    @property
    def data(self) -> torch.Tensor:
        """[size_bytes of the pool] uint8."""

    def is_orphaned(self) -> bool:
        """The process that it depends on has ended, so that nobody may rely on it."""

    def close(self) -> None:
        """Keep it no longer. Safe to repeat."""


class MapMemory(Protocol):
    """A way to map pools. It is for one kind of memory, and maps without a copy."""

    def __call__(self, handle: PoolHandle) -> MappedMemory:
        """Map the pool of a handle whose sizes were checked.

        Raises PoolUnavailable (compute.errors) with its cure, having touched nothing.
        """


class CudaError(Exception):
    """A call of CUDA that failed: its number and its name, such as cudaErrorInvalidValue."""

    def __init__(self, code: int, name: str, text: str = "") -> None:
        super().__init__(f"{name}: {text}" if text else name)
        self.code, self.name = code, name


class CudaRuntime(Protocol):
    """As much of CUDA as mapping a pool needs. Addresses are of device memory.

    Devices are numbered from 0, as far as this process sees them. Calls raise CudaError.
    """

    def device_count(self) -> int: ...

    def device_uuid(self, device: int) -> bytes:
        """16 bytes, the same in every process."""

    def ipc_open(self, device: int, handle: bytes) -> int:
        """Map another process's whole allocation; where it begins.

        A second opening gives the same address, and needs a second closing.
        """

    def ipc_close(self, device: int, address: int) -> None:
        """Unmap it, after all work on it."""

    def view(self, device: int, address: int, size_bytes: int, keeper: object) -> torch.Tensor:
        """[size_bytes] uint8 on the device, no copy. Keeps `keeper` while it has views."""
