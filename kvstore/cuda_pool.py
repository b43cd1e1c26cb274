"""Page pools in the memory of a CUDA device.

The pages are one allocation on the device, which clients map by its handle of legacy CUDA
IPC. Such memory ends with the process that made it, so there is no pool to recover: what
lies beside the pages, the host pool, the frame records and the journal, belongs to no
instance and is swept when its owner is gone (kvstore.posix_pool).

Sources: NVIDIA, CUDA Runtime API, cudaIpcGetMemHandle; CUDA C++ Programming Guide,
Interprocess Communication.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from kvstore.errors import CudaUnavailable, NoRoomForPool
from kvstore.ports import (
    OUT_OF_MEMORY,
    CudaError,
    CudaRuntime,
    DeviceMemory,
    Exported,
    JournalFile,
)
from kvstore.posix_pool import SHM_DIRECTORY, PosixPool, PosixStorage
from kvstore.types import CudaIpcMemory, PoolLayout

# CUDA takes small allocations from a larger one, and a handle gives all of that away.
# Multiples of this are allocations of their own.
_GRANULE_BYTES = 2 * 2**20


class CudaIpcPages:
    """An allocation that other processes can map while this process lives: DeviceMemory."""

    def __init__(self, runtime: CudaRuntime, device: int, size_bytes: int) -> None:
        """Allocate it, all zeros. Raises NoRoomForPool, CudaUnavailable."""
        self._runtime, self._device = runtime, device
        self._address = 0
        granules = -(-size_bytes // _GRANULE_BYTES)
        try:
            self._address = runtime.malloc(device, granules * _GRANULE_BYTES)
            runtime.clear(device, self._address, size_bytes)
            self._exported = Exported(
                CudaIpcMemory(
                    runtime.ipc_handle(device, self._address),
                    runtime.device_uuid(device),
                    os.getpid(),
                    Path("/proc/self/ns/pid").stat().st_ino,
                )
            )
        except CudaError as error:
            self.close()
            if error.code == OUT_OF_MEMORY:
                raise _no_room(size_bytes, device, *_memory(runtime, device)) from None
            raise CudaUnavailable(
                f"a pool of {size_bytes} bytes on cuda:{device} cannot be made and shared by CUDA "
                f"IPC ({error}); see that nvidia-smi lists the device as healthy and that it is no "
                "virtual one (WSL, vGPU), or choose --device cpu",
                cuda_error=error.name,
            ) from None

    def export(self) -> Exported:
        return self._exported

    def close(self) -> None:
        """Free it. CUDA promises nothing to those who still use what they mapped."""
        if self._address:
            address, self._address = self._address, 0
            # A device that has failed has nothing left to give back.
            with contextlib.suppress(CudaError):
                self._runtime.free(self._device, address)


class CudaPool:
    """Pages on a device, and in shared memory what belongs to them: PoolMemory."""

    def __init__(self, pages: DeviceMemory, beside: PosixPool) -> None:
        self._pages, self._beside = pages, beside

    def export(self) -> Exported:
        return self._pages.export()

    def export_host(self) -> Exported | None:
        return self._beside.export_host()

    @property
    def frame_records(self) -> memoryview:
        return self._beside.frame_records

    @property
    def journal(self) -> JournalFile:
        return self._beside.journal

    def touch(self) -> None:
        self._beside.touch()

    def leave(self) -> None:
        """As `close`: without its pages the rest is worth nothing."""
        self.close()

    def close(self) -> None:
        self._beside.close()
        self._pages.close()


class CudaStorage:
    """Makes pools on one device: PoolStorage. There are none to recover."""

    def __init__(self, runtime: CudaRuntime, device: int, directory: Path = SHM_DIRECTORY) -> None:
        """`device`: its number. Raises CudaUnavailable if there is no such device."""
        count = runtime.device_count()
        if device >= count:
            seen = f"cuda:0 to cuda:{count - 1}" if count else "none"
            raise CudaUnavailable(
                f"--device cuda:{device}: this process sees {count} CUDA devices ({seen}); choose "
                "one of them (nvidia-smi and CUDA_VISIBLE_DEVICES say which), or --device cpu"
            )
        self._runtime, self._device = runtime, device
        self._beside = PosixStorage("", directory)

    def create(self, layout: PoolLayout, num_host_blocks: int, records_bytes: int) -> CudaPool:
        """Allocate and clear a pool, and reserve what belongs to it.

        Raises:
            NoRoomForPool: the device, or shared memory, does not hold it.
            CudaUnavailable: the device fails, or cannot share its memory.
        """
        pages = CudaIpcPages(self._runtime, self._device, layout.pool_bytes)
        try:
            host_bytes = num_host_blocks * layout.block_bytes
            return CudaPool(pages, self._beside.create_parts(0, host_bytes, records_bytes))
        except BaseException:
            pages.close()
            raise

    def check_room(self, size_bytes: int) -> None:
        """Raises NoRoomForPool if a pool of `size_bytes` would not fit now."""
        free, total = _memory(self._runtime, self._device)
        if size_bytes > free:
            raise _no_room(size_bytes, self._device, free, total)

    def free_bytes(self) -> int:
        free, _ = _memory(self._runtime, self._device)
        return free // _GRANULE_BYTES * _GRANULE_BYTES

    def recover(self) -> None:
        """None: pages end with the process that made them."""


def _memory(runtime: CudaRuntime, device: int) -> tuple[int, int]:
    """Bytes that are free, and all. Raises CudaUnavailable."""
    try:
        return runtime.memory_info(device)
    except CudaError as error:
        raise CudaUnavailable(
            f"cuda:{device} fails ({error}); see that nvidia-smi lists it as healthy, or choose "
            "--device cpu",
            cuda_error=error.name,
        ) from None


def _no_room(size_bytes: int, device: int, free: int, total: int) -> NoRoomForPool:
    return NoRoomForPool(
        f"the page pool needs {size_bytes} bytes on cuda:{device}, {free} of {total} are free; "
        "choose a smaller --kv-memory, or end what else uses the device (nvidia-smi lists it)",
        needed_bytes=size_bytes,
        available_bytes=free,
    )
