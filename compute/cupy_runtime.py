"""CUDA through CuPy. The only module here that imports it, and only when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from compute.errors import CudaUnavailable
from compute.mapping import CudaError

_UUID_BYTES = 16


class CupyRuntime:
    """compute.mapping.CudaRuntime over CuPy's thin layer on CUDA's own calls.

    CuPy and torch both work in a device's primary context, so what one opens there the
    other can read.
    """

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

    def ipc_open(self, device: int, handle: bytes) -> int:
        with self._on(device):
            return int(self._calls.ipcOpenMemHandle(handle))

    def ipc_close(self, device: int, address: int) -> None:
        with self._on(device):
            self._calls.deviceSynchronize()
            self._calls.ipcCloseMemHandle(address)

    def view(self, device: int, address: int, size_bytes: int, keeper: object) -> torch.Tensor:
        exposed = _Exposed(address, size_bytes, keeper)
        tensor = torch.as_tensor(exposed, device=f"cuda:{device}")
        if tensor.data_ptr() != address:
            raise CudaError(1, "cudaErrorInvalidValue", "torch has copied the pool")
        return tensor

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


class _Exposed:
    """Device memory as torch takes it without a copy; a tensor of it keeps this object."""

    def __init__(self, address: int, size_bytes: int, keeper: object) -> None:
        self.keeper = keeper
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def connect() -> CupyRuntime:
    """CUDA, if there is a device that CuPy and torch both use.

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
    if not torch.cuda.is_available():
        raise CudaUnavailable(
            f"--device cuda: torch {torch.__version__} cannot use the device that CuPy sees; "
            "install a build of torch for CUDA"
        )
    return runtime
