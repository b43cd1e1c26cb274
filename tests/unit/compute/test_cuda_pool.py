"""Mapping a pool of another process's device memory, and what is said if that fails."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from compute import cupy_runtime
from compute.cuda_pool import CudaIpcMapper
from compute.errors import CudaUnavailable, LayoutMismatch, PoolUnavailable
from compute.fake_cuda import FakeCuda
from compute.mapping import CudaError
from compute.pool import AttachedPool
from compute.types import KvShape, PoolLayout, PosixMemory
from kvstore.fake_cuda import FakeCuda as ExportingCuda
from tests.cuda_exporter import ExporterProcess

SHAPE = KvShape(num_layers=3, num_kv_heads=2, head_size=8, dtype="float32")
LAYOUT = PoolLayout(SHAPE, 8, 5)
MEMORY = 64 * 2**20


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Of a machine with two devices."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-") as path:
        ExportingCuda.build(Path(path), [MEMORY, MEMORY])
        yield Path(path)


@pytest.fixture(scope="module")
def exporter(folder) -> Iterator[ExporterProcess]:
    process = ExporterProcess(folder, LAYOUT)
    yield process
    process.kill()


@pytest.fixture
def cuda(folder) -> FakeCuda:
    return FakeCuda(folder)


def is_mapped(exporter) -> bool:
    return exporter.pages.name in Path("/proc/self/maps").read_text()


def attach(exporter, cuda, device=0, **changes) -> AttachedPool:
    handle = dataclasses.replace(exporter.handle, **changes)
    return AttachedPool(handle, handle.layout.shape, CudaIpcMapper(cuda, device))


def refusal(exporter, cuda, device=0, **changes) -> PoolUnavailable:
    with pytest.raises(PoolUnavailable) as caught:
        attach(exporter, cuda, device, **changes)
    assert not is_mapped(exporter)
    return caught.value


def changed_memory(exporter, **changes):
    return {"memory": dataclasses.replace(exporter.handle.memory, **changes)}


# --- what is mapped ---------------------------------------------------------


def test_a_write_is_in_the_exporters_memory_at_once_and_without_a_copy(exporter, cuda):
    pool = attach(exporter, cuda)
    assert pool.tensor.shape == (5, 3, 2, 8, 2, 8)
    pool.tensor[3, 2, 1, 7, 1, 5] = 42.0
    stored = torch.frombuffer(bytearray(exporter.pages.read_bytes()), dtype=torch.float32)
    index = 3 * LAYOUT.block_bytes + 2 * 2 * LAYOUT.plane_bytes + LAYOUT.plane_bytes
    index = index // 4 + (7 * 2 + 1) * 8 + 5
    assert stored[index] == 42.0
    with exporter.pages.open("r+b") as file:
        file.seek(4 * index)
        file.write(torch.tensor(7.0).numpy().tobytes())
    assert pool.tensor[3, 2, 1, 7, 1, 5] == 7.0
    pool.tensor.zero_()
    pool.close()


def test_two_attachments_of_one_process_share_a_mapping_that_ends_with_the_last(exporter, cuda):
    first, second = attach(exporter, cuda), attach(exporter, cuda)
    assert first.tensor.data_ptr() == second.tensor.data_ptr()
    first.close()
    first.close()
    assert is_mapped(exporter)
    assert (second.tensor == 0).all()
    with pytest.raises(PoolUnavailable, match="closed"):
        _ = first.tensor
    second.close()
    assert not is_mapped(exporter)


def test_a_view_that_is_still_held_stays_readable_until_it_is_dropped(exporter, cuda):
    pool = attach(exporter, cuda)
    view = pool.tensor[1]
    pool.close()
    assert (view == 0).all()
    assert is_mapped(exporter)
    del view
    assert not is_mapped(exporter)


def test_a_handle_is_of_the_whole_allocation_and_the_offset_says_where_the_pool_starts(
    exporter, cuda
):
    layout = dataclasses.replace(LAYOUT, num_blocks=2)
    whole = attach(exporter, cuda)
    part = attach(
        exporter,
        cuda,
        layout=layout,
        offset_bytes=3 * LAYOUT.block_bytes,
        size_bytes=layout.pool_bytes,
    )
    part.tensor[0] = 5.0
    assert (whole.tensor[3] == 5.0).all()
    assert (whole.tensor[4] == 0.0).all()
    whole.tensor.zero_()
    part.close()
    whole.close()
    assert not is_mapped(exporter)


def test_devices_are_found_by_uuid_whatever_their_numbers_are(exporter, folder):
    pool = attach(exporter, FakeCuda(folder, [1, 0]), device=1)
    assert (pool.tensor == 0).all()
    pool.close()


# --- what is refused before any memory is touched ---------------------------


@pytest.mark.parametrize(
    "change",
    [{"num_layers": 4}, {"num_kv_heads": 1}, {"head_size": 16}, {"dtype": "float16"}],
)
def test_another_layout_is_a_mismatch_before_anything_is_opened(exporter, cuda, change):
    cuda.ipc_open = None
    with pytest.raises(LayoutMismatch, match="the model writes"):
        AttachedPool(exporter.handle, dataclasses.replace(SHAPE, **change), CudaIpcMapper(cuda, 0))
    with pytest.raises(LayoutMismatch, match="its layout needs"):
        attach(exporter, cuda, size_bytes=LAYOUT.pool_bytes - 64)


def test_a_pool_in_shared_memory_is_not_computed_on_by_a_device(exporter, cuda):
    error = refusal(exporter, cuda, memory=PosixMemory("quire-x"))
    assert "start the kvstore with --device cuda" in str(error)


def test_a_pool_on_a_device_is_not_computed_on_by_a_cpu(exporter):
    with pytest.raises(PoolUnavailable, match="start compute with --device cuda"):
        AttachedPool(exporter.handle, SHAPE)


def test_the_worker_must_be_on_the_pools_device(exporter, cuda, folder):
    error = refusal(exporter, cuda, device=1)
    assert "start compute with --device cuda:0" in str(error)
    error = refusal(exporter, FakeCuda(folder, [1]))
    assert "which this worker does not see" in str(error)
    assert "CUDA_VISIBLE_DEVICES" in str(error)
    assert str(error.metadata["device_uuid"]).startswith("GPU-")


@pytest.mark.parametrize("handle", [b"", b"x" * 63, b"x" * 65])
def test_a_handle_of_another_length_is_of_another_version(exporter, cuda, handle):
    error = refusal(exporter, cuda, **changed_memory(exporter, handle=handle))
    assert "versions that fit together" in str(error)


def test_a_device_that_is_not_there_is_refused_at_once(cuda):
    with pytest.raises(CudaUnavailable, match=r"cuda:2.*2 CUDA devices.*CUDA_VISIBLE_DEVICES"):
        CudaIpcMapper(cuda, 2)


class Failing(FakeCuda):
    def device_uuid(self, device):
        raise CudaError(214, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered")


def test_a_device_that_fails_is_said_to_fail(folder):
    with pytest.raises(CudaUnavailable, match=r"ECC.*nvidia-smi.*--device cpu"):
        CudaIpcMapper(Failing(folder), 0)


# --- what CUDA refuses ------------------------------------------------------


def test_a_handle_that_is_none_leads_to_what_both_processes_must_share(exporter, cuda):
    error = refusal(exporter, cuda, **changed_memory(exporter, handle=b"x" * 64))
    assert error.metadata["cuda_error"] == "cudaErrorInvalidValue"
    assert "share PID and IPC namespaces" in str(error)
    assert "nvidia-smi" in str(error)


def test_a_pool_that_ends_before_its_handle_says_is_refused(exporter, cuda):
    layout = dataclasses.replace(LAYOUT, num_blocks=10**5)
    error = refusal(exporter, cuda, layout=layout, size_bytes=layout.pool_bytes)
    assert error.metadata["cuda_error"] == "cudaErrorInvalidValue"


def test_a_container_of_its_own_is_told_which_namespace_to_share(exporter, folder):
    isolated = FakeCuda(folder, is_isolated=True)
    error = refusal(exporter, isolated, **changed_memory(exporter, exporter_pid_namespace=1))
    assert error.metadata["cuda_error"] == "cudaErrorDeviceUninitialized"
    for word in ("PID namespaces", "--pid=container:NAME", "shareProcessNamespace: true"):
        assert word in str(error)


def test_devices_without_a_way_between_them_are_said_to_be_that(exporter, cuda, folder):
    # Only a device that is hidden from us has another number than ours and our UUID.
    memory = changed_memory(exporter, device_uuid=cuda.device_uuid(1))
    error = refusal(exporter, cuda, device=1, **memory)
    assert error.metadata["cuda_error"] == "cudaErrorPeerAccessUnsupported"
    assert "start both with the same --device" in str(error)


def test_a_process_cannot_map_its_own_memory(folder, cuda):
    exporting = ExportingCuda(folder)
    address = exporting.malloc(0, LAYOUT.pool_bytes)
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    process = ExporterProcess(folder, LAYOUT)
    memory = changed_memory(
        process,
        handle=exporting.ipc_handle(0, address),
        exporter_pid=os.getpid(),
        exporter_pid_namespace=namespace,
    )
    error = refusal(process, cuda, **memory)
    assert error.metadata["cuda_error"] == "cudaErrorDeviceUninitialized"
    assert "processes of their own" in str(error)
    exporting.free(0, address)
    process.kill()


class Sandboxed(FakeCuda):
    def ipc_open(self, device, handle):
        raise CudaError(801, "cudaErrorNotSupported", "operation not supported")


def test_a_system_without_cuda_ipc_is_told_to_do_without(exporter, folder):
    error = refusal(exporter, Sandboxed(folder))
    assert "no CUDA IPC" in str(error)
    assert "--device cpu" in str(error)


def test_memory_of_a_process_that_has_ended_cannot_be_mapped(folder, cuda):
    process = ExporterProcess(folder, LAYOUT)
    process.kill()
    error = refusal(process, cuda)
    assert error.metadata["cuda_error"] == "cudaErrorMapBufferObjectFailed"
    assert f"(pid {process.handle.memory.exporter_pid}) has ended" in str(error)
    assert "start the kvstore again" in str(error)


# --- the exporter's end -----------------------------------------------------


def test_a_pool_is_orphaned_when_its_exporter_ends_and_not_before(folder, cuda):
    process = ExporterProcess(folder, LAYOUT)
    pool = attach(process, cuda)
    assert not pool.is_orphaned()
    process.kill()
    assert pool.is_orphaned()
    pool.close()
    assert not pool.is_orphaned()  # there is nothing left to let go
    assert not is_mapped(process)


def test_an_exporter_of_another_namespace_is_not_watched(exporter, cuda):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    memory = changed_memory(exporter, exporter_pid=gone.pid, exporter_pid_namespace=1)
    pool = attach(exporter, cuda, **memory)
    assert not pool.is_orphaned()
    pool.close()


def test_a_kernel_without_pidfds_has_exporters_that_cannot_be_watched(exporter, cuda, monkeypatch):
    def missing(pid):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", missing)
    pool = attach(exporter, cuda)
    assert not pool.is_orphaned()
    pool.close()


def test_without_cupy_the_text_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(CudaUnavailable, match=r"pip install -e '\.\[cuda\]' \(brings cupy-cuda13x"):
        cupy_runtime.connect()
