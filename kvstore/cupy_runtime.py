"""CUDA through CuPy. The only module here that imports it, and only when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvstore.errors import CudaUnavailable
from kvstore.ports import CudaError

_UUID_BYTES = 16


class CupyRuntime:
    """kvstore.ports.CudaRuntime over CuPy's thin layer on CUDA's own calls."""

    def __init__(self, cupy: Any) -> None:
        """`cupy`: the module. Use `connect`."""
        self._cupy = cupy
        self._calls = cupy.cuda.runtime

    def device_count(self) -> int:
        with self._translated():
            return int(self._calls.getDeviceCount())

    def device_uuid(self, device: int) -> bytes:
        with self._translated():
            uuid: bytes = self._calls.getDeviceProperties(device)["uuid"]
        # It comes as a C string, which ends with the first zero.
        return uuid[:_UUID_BYTES].ljust(_UUID_BYTES, b"\0")

    def memory_info(self, device: int) -> tuple[int, int]:
        with self._on(device):
            free, total = self._calls.memGetInfo()
            return int(free), int(total)

    def malloc(self, device: int, size_bytes: int) -> int:
        # Not from CuPy's memory pool: a handle is of a whole allocation.
        with self._on(device):
            return int(self._calls.malloc(size_bytes))

    def clear(self, device: int, address: int, size_bytes: int) -> None:
        with self._on(device):
            self._calls.memset(address, 0, size_bytes)
            self._calls.deviceSynchronize()

    def free(self, device: int, address: int) -> None:
        with self._on(device):
            self._calls.free(address)

    def ipc_handle(self, device: int, address: int) -> bytes:
        with self._on(device):
            return bytes(self._calls.ipcGetMemHandle(address))

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        """The device that the calls of this thread are for."""
        with self._translated(), self._cupy.cuda.Device(device):
            yield

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except self._calls.CUDARuntimeError as error:
            name, _, text = str(error).partition(": ")
            raise CudaError(int(error.status), name, text) from None


def connect() -> CupyRuntime:
    """CUDA, if there is a device.

    Raises CudaUnavailable: there is no CuPy, no driver or no device; the text says which.
    """
    try:
        import cupy
    except ImportError as error:
        raise CudaUnavailable(
            f"--device cuda needs CuPy, which cannot be imported ({error}): install Quire with its "
            "extra, in its folder: pip install -e '.[cuda]' (brings cupy-cuda13x, for drivers from "
            "580 on) or '.[cuda12]' (cupy-cuda12x, for older ones)"
        ) from None
    runtime = CupyRuntime(cupy)
    try:
        count = runtime.device_count()
    except CudaError as error:
        raise CudaUnavailable(
            f"--device cuda: CUDA does not start ({error}); see that nvidia-smi lists a device and "
            "that CuPy is for this driver, or choose --device cpu",
            cuda_error=error.name,
        ) from None
    if not count:
        raise CudaUnavailable("--device cuda: there is no CUDA device; choose --device cpu")
    return runtime
