"""Which of CuPy's calls are made, on which device, and what becomes of its errors."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from compute import cupy_runtime
from compute.errors import CudaUnavailable
from compute.mapping import CudaError


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
            "ipcOpenMemHandle": lambda handle: 4096,
            "deviceSynchronize": lambda: None,
            "ipcCloseMemHandle": lambda address: None,
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
    assert runtime.ipc_open(1, b"h" * 64) == 4096
    runtime.ipc_close(1, 4096)
    assert cupy.calls == [
        (1, "ipcOpenMemHandle", b"h" * 64),
        (1, "deviceSynchronize"),
        (1, "ipcCloseMemHandle", 4096),
    ]
    assert cupy.present == 0


def test_a_uuid_has_sixteen_bytes_though_cupy_ends_it_at_its_first_zero():
    assert cupy_runtime.CupyRuntime(FakeCupy()).device_uuid(0) == b"\x01\x02" + bytes(14)


def test_an_error_keeps_its_number_and_its_name():
    cupy = FakeCupy(error=CUDARuntimeError(1, "cudaErrorInvalidValue: invalid argument"))
    with pytest.raises(CudaError, match="invalid argument") as caught:
        cupy_runtime.CupyRuntime(cupy).ipc_open(0, b"h" * 64)
    assert (caught.value.code, caught.value.name) == (1, "cudaErrorInvalidValue")


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


def test_torch_must_see_the_device_too(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CudaUnavailable, match="install a build of torch for CUDA"):
        cupy_runtime.connect()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cupy_runtime.connect().device_count() == 2


def test_a_view_that_torch_has_copied_is_none(monkeypatch):
    def copied(exposed, device):
        assert device == "cuda:1"
        assert exposed.__cuda_array_interface__ == {
            "shape": (64,),
            "typestr": "|u1",
            "data": (4096, False),
            "version": 3,
        }
        return torch.zeros(64, dtype=torch.uint8)

    monkeypatch.setattr(torch, "as_tensor", copied)
    with pytest.raises(CudaError, match="copied"):
        cupy_runtime.CupyRuntime(FakeCupy()).view(1, 4096, 64, object())
