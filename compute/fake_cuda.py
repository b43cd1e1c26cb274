"""The importer's half of a CUDA that needs no GPU; kvstore has the other one.

A machine is a folder in shared memory, which all of its processes name:

    machine.json            {"memory_bytes": [of each device], "has_peers": whether they
                            reach each other's memory}
    device-<n>/<id>         an allocation; the process that made it holds a flock on it,
                            which the kernel drops when the process ends, however it does

A handle has 64 bytes as CUDA's: `quirfake`, pid of the exporter and number of the device
(4 bytes each, little-endian), the id (16 hex digits), zeros.
"""

# An address alone says which device it is on.
# ruff: noqa: ARG002

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compute.mapping import CudaError

_HANDLE = struct.Struct("<8sii16s32x")
_MAGIC = b"quirfake"


@dataclass(slots=True)
class _Opened:
    handle: bytes
    memory: torch.Tensor  # what is mapped, until it goes
    num_openings: int = 1


class FakeCuda:
    """compute.mapping.CudaRuntime over a machine's folder. Its tensors are of the CPU."""

    def __init__(
        self, folder: Path, visible: Sequence[int] | None = None, *, is_isolated: bool = False
    ) -> None:
        """`visible`: the machine's devices that this process sees, in its order; None: all.

        `is_isolated`: it is in a PID namespace of its own, as in another container.
        """
        machine = json.loads((folder / "machine.json").read_text(encoding="ascii"))
        self._folder = folder
        self._has_peers: bool = machine["has_peers"]
        count = len(machine["memory_bytes"])
        self._visible = list(range(count) if visible is None else visible)
        self._is_isolated = is_isolated
        self._opened: dict[int, _Opened] = {}  # by address

    def device_count(self) -> int:
        return len(self._visible)

    def device_uuid(self, device: int) -> bytes:
        text = f"{self._folder.name}/device-{self._visible[device]}"
        return hashlib.sha256(text.encode()).digest()[:16]

    def ipc_open(self, device: int, handle: bytes) -> int:
        for address, opened in self._opened.items():
            if opened.handle == handle:
                opened.num_openings += 1
                return address
        memory = self._map(self._find(device, handle))
        self._opened[memory.data_ptr()] = _Opened(handle, memory)
        return memory.data_ptr()

    def ipc_close(self, device: int, address: int) -> None:
        if address not in self._opened:
            raise _invalid_value()
        opened = self._opened[address]
        opened.num_openings -= 1
        if not opened.num_openings:
            del self._opened[address]

    def view(self, device: int, address: int, size_bytes: int, keeper: object) -> torch.Tensor:
        sizes = {base: len(opened.memory) for base, opened in self._opened.items()}
        if not any(base <= address <= base + sizes[base] - size_bytes for base in sizes):
            raise _invalid_value()
        # A plain pointer, as in CUDA: it keeps nothing mapped.
        exposed = _exposed(address, size_bytes)
        exposed.keeper = keeper
        return torch.frombuffer(exposed, dtype=torch.uint8)

    def _find(self, device: int, handle: bytes) -> Path:
        """The allocation of a handle. Raises as CUDA does if it cannot be opened."""
        if len(handle) != _HANDLE.size or not handle.startswith(_MAGIC):
            raise _invalid_value()
        _, pid, number, name = _HANDLE.unpack(handle)
        if self._is_isolated or pid == os.getpid():
            raise CudaError(201, "cudaErrorDeviceUninitialized", "invalid device context")
        if number != self._visible[device] and not self._has_peers:
            text = "peer access is not supported between these two devices"
            raise CudaError(217, "cudaErrorPeerAccessUnsupported", text)
        return self._folder / f"device-{number}" / name.decode()

    @staticmethod
    def _map(path: Path) -> torch.Tensor:
        try:
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            raise _map_failed() from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # its exporter lives
            return torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
        finally:
            os.close(descriptor)
        raise _map_failed()


def _exposed(address: int, size_bytes: int) -> Any:
    kind: Any = type("Bytes", (ctypes.c_ubyte * size_bytes,), {})
    return kind.from_address(address)


def _invalid_value() -> CudaError:
    return CudaError(1, "cudaErrorInvalidValue", "invalid argument")


def _map_failed() -> CudaError:
    return CudaError(205, "cudaErrorMapBufferObjectFailed", "mapping of buffer object failed")
