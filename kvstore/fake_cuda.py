"""The exporter's half of a CUDA that needs no GPU; compute has the other one.

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

import fcntl
import hashlib
import json
import os
import secrets
import struct
from collections.abc import Sequence
from pathlib import Path

from kvstore.ports import OUT_OF_MEMORY, CudaError

_HANDLE = struct.Struct("<8sii16s32x")
_MAGIC = b"quirfake"
_FIRST_ADDRESS = 0x7F00_0000_0000
_GARBAGE = b"\xa5" * 4096  # what new memory begins with


class FakeCuda:
    """kvstore.ports.CudaRuntime over a machine's folder."""

    def __init__(self, folder: Path, visible: Sequence[int] | None = None) -> None:
        """`visible`: the machine's devices that this process sees, in its order; None: all."""
        machine = json.loads((folder / "machine.json").read_text(encoding="ascii"))
        self._folder = folder
        self._memory_bytes: list[int] = machine["memory_bytes"]
        self._visible = list(range(len(self._memory_bytes)) if visible is None else visible)
        self._allocated: dict[int, tuple[Path, int]] = {}  # by address; with a descriptor
        self._next_address = _FIRST_ADDRESS

    @staticmethod
    def build(folder: Path, memory_bytes: Sequence[int], *, has_peers: bool = False) -> None:
        """Make the machine of a folder, with devices of so much memory."""
        for number in range(len(memory_bytes)):
            (folder / f"device-{number}").mkdir()
        machine = {"memory_bytes": list(memory_bytes), "has_peers": has_peers}
        (folder / "machine.json").write_text(json.dumps(machine), encoding="ascii")

    def device_count(self) -> int:
        return len(self._visible)

    def device_uuid(self, device: int) -> bytes:
        text = f"{self._folder.name}/device-{self._visible[device]}"
        return hashlib.sha256(text.encode()).digest()[:16]

    def memory_info(self, device: int) -> tuple[int, int]:
        number = self._visible[device]
        used = 0
        for path in (self._folder / f"device-{number}").iterdir():
            used += _size_if_alive(path)
        total = self._memory_bytes[number]
        return total - used, total

    def malloc(self, device: int, size_bytes: int) -> int:
        if size_bytes > self.memory_info(device)[0]:
            raise CudaError(OUT_OF_MEMORY, "cudaErrorMemoryAllocation", "out of memory")
        path = self._folder / f"device-{self._visible[device]}" / secrets.token_hex(8)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.ftruncate(descriptor, size_bytes)
        os.pwrite(descriptor, _GARBAGE[:size_bytes], 0)
        address, self._next_address = self._next_address, self._next_address + size_bytes
        self._allocated[address] = (path, descriptor)
        return address

    def clear(self, device: int, address: int, size_bytes: int) -> None:
        _, descriptor = self._of(address)
        length = os.fstat(descriptor).st_size
        if size_bytes > length:
            raise _invalid_value()
        os.pwrite(descriptor, bytes(min(size_bytes, len(_GARBAGE))), 0)

    def free(self, device: int, address: int) -> None:
        path, descriptor = self._of(address)
        del self._allocated[address]
        path.unlink(missing_ok=True)
        os.close(descriptor)

    def ipc_handle(self, device: int, address: int) -> bytes:
        path, _ = self._of(address)
        return _HANDLE.pack(_MAGIC, os.getpid(), self._visible[device], path.name.encode())

    def _of(self, address: int) -> tuple[Path, int]:
        if address not in self._allocated:
            raise _invalid_value()
        return self._allocated[address]


def _invalid_value() -> CudaError:
    return CudaError(1, "cudaErrorInvalidValue", "invalid argument")


def _size_if_alive(path: Path) -> int:
    """Of an allocation; that of a process that has ended is gone, as CUDA's is."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return 0
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.fstat(descriptor).st_size
    else:
        path.unlink(missing_ok=True)
        return 0
    finally:
        os.close(descriptor)
