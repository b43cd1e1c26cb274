"""Mapping pools in the memory of a CUDA device, by handles of legacy CUDA IPC.

Whatever keeps a handle from being opened, CUDA says little more than "invalid argument",
so we look for the reason ourselves and name the cure.

Sources: NVIDIA, CUDA Runtime API, cudaIpcOpenMemHandle.
"""

from __future__ import annotations

import contextlib
import os
import uuid
import weakref

import torch

from compute.errors import CudaUnavailable, PoolUnavailable
from compute.exporter import Exporter
from compute.mapping import CudaError, CudaRuntime
from compute.types import CudaIpcMemory, PoolHandle

_HANDLE_BYTES = 64
_NO_PEER = ("cudaErrorPeerAccessUnsupported", "cudaErrorTooManyPeers")
_NOT_SUPPORTED = ("cudaErrorNotSupported", "cudaErrorNotPermitted", "cudaErrorOperatingSystem")


class CudaIpcMapping:
    """A mapped allocation: compute.mapping.MappedMemory."""

    def __init__(self, data: torch.Tensor, exporter: Exporter) -> None:
        self.data = data
        self._exporter = exporter

    def is_orphaned(self) -> bool:
        return self._exporter.has_ended()

    def close(self) -> None:
        self.data = torch.empty(0, dtype=torch.uint8)
        self._exporter.close()


class CudaIpcMapper:
    """Maps pools on the device that we compute on: compute.mapping.MapMemory."""

    def __init__(self, runtime: CudaRuntime, device: int) -> None:
        """`device`: its number. Raises CudaUnavailable: there is no such device, or CUDA fails."""
        try:
            self._seen = [runtime.device_uuid(n) for n in range(runtime.device_count())]
        except CudaError as error:
            raise CudaUnavailable(
                f"--device cuda:{device}: CUDA fails ({error}); see that nvidia-smi lists the "
                "device as healthy, or choose --device cpu",
                cuda_error=error.name,
            ) from None
        if device >= len(self._seen):
            raise CudaUnavailable(
                f"--device cuda:{device}: this process sees {len(self._seen)} CUDA devices; choose "
                "one of them (nvidia-smi and CUDA_VISIBLE_DEVICES say which), or --device cpu"
            )
        self._runtime, self._device = runtime, device

    def __call__(self, handle: PoolHandle) -> CudaIpcMapping:
        """Map a pool without a copy. Raises PoolUnavailable, which names the cure."""
        memory = handle.memory
        if not isinstance(memory, CudaIpcMemory):
            raise PoolUnavailable(
                "the pool is in shared memory, and this worker computes on "
                f"cuda:{self._device}: start the kvstore with --device cuda, or compute with "
                "--device cpu"
            )
        if len(memory.handle) != _HANDLE_BYTES:
            raise PoolUnavailable(
                f"the handle of the pool has {len(memory.handle)} bytes, one of CUDA IPC has "
                f"{_HANDLE_BYTES}: kvstore and compute must be of versions that fit together"
            )
        self._check_device(memory)
        exporter = Exporter(memory.exporter_pid, memory.exporter_pid_namespace)
        try:
            data = self._open(memory, handle.offset_bytes, handle.size_bytes)
        except CudaError as error:
            text = f"the pool on cuda:{self._device} cannot be mapped ({error}): "
            text += _reason(error, exporter)
            exporter.close()
            raise PoolUnavailable(text, cuda_error=error.name) from None
        return CudaIpcMapping(data, exporter)

    def _check_device(self, memory: CudaIpcMemory) -> None:
        if self._seen[self._device] == memory.device_uuid:
            return
        name = f"GPU-{_uuid_text(memory.device_uuid)}"
        if memory.device_uuid in self._seen:
            there = self._seen.index(memory.device_uuid)
            raise PoolUnavailable(
                f"the pool is on {name}, which is cuda:{there} here, and this worker computes on "
                f"cuda:{self._device}: start compute with --device cuda:{there}",
                device_uuid=name,
            )
        raise PoolUnavailable(
            f"the pool is on {name}, which this worker does not see: start both on one device, and "
            "give both containers that device (CUDA_VISIBLE_DEVICES, docker run --gpus)",
            device_uuid=name,
        )

    def _open(self, memory: CudaIpcMemory, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        runtime, device = self._runtime, self._device
        base = runtime.ipc_open(device, memory.handle)
        keeper = _Opened()
        # Once no view of the tensor is left. At the end of this process CUDA does it itself.
        closing = weakref.finalize(keeper, _close, runtime, device, base)
        closing.atexit = False
        try:
            return runtime.view(device, base + offset_bytes, size_bytes, keeper)
        except CudaError:
            closing()
            raise


class _Opened:
    """Dies with the last view of what was opened."""


def _close(runtime: CudaRuntime, device: int, address: int) -> None:
    # The memory may have ended with its exporter; there is nothing to unmap then.
    with contextlib.suppress(CudaError):
        runtime.ipc_close(device, address)


def _reason(error: CudaError, exporter: Exporter) -> str:
    """Why a handle was not opened, and what helps."""
    if not exporter.is_in_our_namespace:
        return (
            "kvstore and compute are in different PID namespaces, which CUDA IPC does not cross; "
            "let their containers share one (docker run --pid=container:NAME --ipc=container:NAME; "
            "in Kubernetes one pod with shareProcessNamespace: true)"
        )
    if exporter.pid == os.getpid():
        return (
            "it was allocated by this process, and CUDA IPC only maps memory of others; run "
            "kvstore and compute as processes of their own, as `quire up` does"
        )
    if exporter.has_ended():
        return (
            f"the kvstore that made it (pid {exporter.pid}) has ended, and its device memory with "
            "it; start the kvstore again, and compute attaches its new pool"
        )
    if error.name in _NO_PEER:
        return (
            "the device that compute works on cannot reach the one that has the pool; start both "
            "with the same --device"
        )
    if error.name in _NOT_SUPPORTED:
        return (
            "this system has no CUDA IPC (WSL, virtual GPUs and some integrated ones have none, "
            "sandboxes may forbid it); choose --device cpu"
        )
    return (
        f"the kvstore (pid {exporter.pid}) runs, so see that both run as one user with one driver, "
        "that their containers share PID and IPC namespaces, and that nvidia-smi lists the device "
        "as healthy; then start both again"
    )


def _uuid_text(device_uuid: bytes) -> str:
    """As nvidia-smi writes it; of what is no UUID, its digits."""
    try:
        return str(uuid.UUID(bytes=device_uuid))
    except ValueError:
        return device_uuid.hex()
