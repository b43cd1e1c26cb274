"""Which of CuPy's calls are made, on which device, and what becomes of its errors."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from kvstore import cupy_runtime
from kvstore.errors import CudaUnavailable
from kvstore.ports import CudaError


class CUDARuntimeError(RuntimeError):
    """Spelled as CuPy's."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class FakeCupy:
    """Notes each call with the device that it is for."""

    def __init__(self, count: int = 2, error: CUDARuntimeError | None = None) -> None:
        self.calls, self.present, self.error, self.count = [], 0, error, count
        answers = {
            "getDeviceCount": lambda: self.count,
            "getDeviceProperties": lambda device: {"name": b"H200", "uuid": b"\x01\x02"},
            "memGetInfo": lambda: (3, 4),
            "malloc": lambda size: 4096,
            "memset": lambda address, value, size: None,
            "deviceSynchronize": lambda: None,
            "free": lambda address: None,
            "ipcGetMemHandle": lambda address: b"h" * 64,
        }
        runtime = {name: self._noting(name, answer) for name, answer in answers.items()}
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(CUDARuntimeError=CUDARuntimeError, **runtime),
            Device=self._device,
        )

    def _noting(self, name, answer):
        def call(*arguments):
            self.calls.append((self.present, name, *arguments))
            if self.error is not None:
                raise self.error
            return answer(*arguments)

        return call

    @contextmanager
    def _device(self, number):
        before, self.present = self.present, number
        try:
            yield
        finally:
            self.present = before


def test_calls_are_made_on_their_device():
    cupy = FakeCupy()
    runtime = cupy_runtime.CupyRuntime(cupy)
    assert runtime.memory_info(1) == (3, 4)
    assert runtime.malloc(1, 100) == 4096
    runtime.clear(1, 4096, 100)
    assert runtime.ipc_handle(1, 4096) == b"h" * 64
    runtime.free(1, 4096)
    assert cupy.calls == [
        (1, "memGetInfo"),
        (1, "malloc", 100),
        (1, "memset", 4096, 0, 100),
        (1, "deviceSynchronize"),
        (1, "ipcGetMemHandle", 4096),
        (1, "free", 4096),
    ]
    assert cupy.present == 0


def test_a_uuid_has_sixteen_bytes_though_cupy_ends_it_at_its_first_zero():
    assert cupy_runtime.CupyRuntime(FakeCupy()).device_uuid(0) == b"\x01\x02" + bytes(14)


def test_an_error_keeps_its_number_and_its_name():
    cupy = FakeCupy(error=CUDARuntimeError(2, "cudaErrorMemoryAllocation: out of memory"))
    with pytest.raises(CudaError, match="out of memory") as caught:
        cupy_runtime.CupyRuntime(cupy).malloc(0, 1)
    assert (caught.value.code, caught.value.name) == (2, "cudaErrorMemoryAllocation")


@pytest.mark.parametrize(
    ("cupy", "words"),
    [
        (
            FakeCupy(error=CUDARuntimeError(35, "cudaErrorInsufficientDriver: too old")),
            r"does not start \(cudaErrorInsufficientDriver: too old\).*nvidia-smi.*--device cpu",
        ),
        (FakeCupy(count=0), r"there is no CUDA device; choose --device cpu"),
    ],
)
def test_a_machine_without_a_device_is_told_so(monkeypatch, cupy, words):
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(CudaUnavailable, match=words):
        cupy_runtime.connect()


def test_a_machine_with_one_is_connected(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy())
    assert cupy_runtime.connect().device_count() == 2
