"""Pools on a device: what is allocated, exported, given back, and what is said if not."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import cupy_runtime
from kvstore.attachment import ManagerOptions
from kvstore.cuda_pool import CudaIpcPages, CudaStorage
from kvstore.errors import CudaUnavailable, NoRoomForPool
from kvstore.fake_cuda import FakeCuda
from kvstore.manager import PageManager
from kvstore.ports import CudaError
from kvstore.posix_pool import SHM_DIRECTORY
from kvstore.types import CommitPlan, KvShape, PoolLayout, PosixMemory

MIB = 2**20
MEMORY = 64 * MIB
SHAPE = KvShape(num_layers=2, num_kv_heads=2, head_size=8, dtype="float16")
LAYOUT = PoolLayout(SHAPE, 16, 100)
RECORDS = 4096


@pytest.fixture
def folder() -> Iterator[Path]:
    """Of a machine with two devices of 64 MiB; its shared memory is beside them."""
    with tempfile.TemporaryDirectory(dir=SHM_DIRECTORY, prefix="test-") as path:
        FakeCuda.build(Path(path), [MEMORY, MEMORY])
        (Path(path) / "shm").mkdir()
        yield Path(path)


@pytest.fixture
def cuda(folder) -> FakeCuda:
    return FakeCuda(folder)


@pytest.fixture
def storage(cuda, folder) -> CudaStorage:
    return CudaStorage(cuda, 0, folder / "shm")


def allocations(folder: Path, device: int = 0) -> list[Path]:
    return list((folder / f"device-{device}").iterdir())


def objects(folder: Path) -> list[str]:
    return sorted(path.suffix for path in (folder / "shm").iterdir())


def test_pages_are_on_the_device_and_what_belongs_to_them_in_shared_memory(storage, cuda, folder):
    pool = storage.create(LAYOUT, 3, RECORDS)
    assert objects(folder) == ["", ".frames", ".host", ".journal"]
    assert sum(path.stat().st_size for path in (folder / "shm").iterdir()) == (
        3 * LAYOUT.block_bytes + RECORDS
    )
    (pages,) = allocations(folder)
    assert LAYOUT.pool_bytes <= pages.stat().st_size < MEMORY
    assert pages.read_bytes() == bytes(pages.stat().st_size)
    assert pool.export_host().memory == PosixMemory(pool._beside.name + ".host")
    assert len(pool.frame_records) == RECORDS
    pool.close()
    pool.close()
    assert objects(folder) == allocations(folder) == []
    assert cuda.memory_info(0) == (MEMORY, MEMORY)


def test_what_is_exported_says_who_has_it_and_where(storage, cuda):
    pool = storage.create(LAYOUT, 0, RECORDS)
    memory, offset_bytes = pool.export()
    assert offset_bytes == 0
    assert len(memory.handle) == 64
    assert memory.device_uuid == cuda.device_uuid(0) != cuda.device_uuid(1)
    assert memory.exporter_pid == os.getpid()
    assert memory.exporter_pid_namespace == Path("/proc/self/ns/pid").stat().st_ino
    assert pool.export() == (memory, offset_bytes)
    assert pool.export_host() is None
    pool.close()


def test_an_allocation_is_of_whole_granules_so_that_a_handle_gives_nothing_else_away(cuda, folder):
    for size_bytes in (1, 2 * MIB, 2 * MIB + 1):
        pages = CudaIpcPages(cuda, 1, size_bytes)
        (path,) = allocations(folder, 1)
        assert path.stat().st_size == -(-size_bytes // (2 * MIB)) * 2 * MIB
        pages.close()


@pytest.mark.parametrize("num_blocks", [MEMORY // LAYOUT.block_bytes + 1, 10**9])
def test_a_device_without_room_names_the_cure_and_keeps_nothing(storage, folder, num_blocks):
    huge = dataclasses.replace(LAYOUT, num_blocks=num_blocks)
    with pytest.raises(NoRoomForPool, match=r"cuda:0.*--kv-memory.*nvidia-smi") as caught:
        storage.create(huge, 0, RECORDS)
    assert caught.value.metadata == {
        "needed_bytes": str(huge.pool_bytes),
        "available_bytes": str(MEMORY),
    }
    assert objects(folder) == allocations(folder) == []
    with pytest.raises(NoRoomForPool, match="--kv-memory"):
        storage.check_room(huge.pool_bytes)
    storage.check_room(LAYOUT.pool_bytes)


def test_shared_memory_without_room_gives_the_device_memory_back(storage, folder):
    with pytest.raises(NoRoomForPool, match="/dev/shm"):
        storage.create(LAYOUT, 10**12, RECORDS)
    assert objects(folder) == allocations(folder) == []


class Unshareable(FakeCuda):
    def ipc_handle(self, device, address):
        raise CudaError(801, "cudaErrorNotSupported", "operation not supported")


def test_a_device_that_cannot_share_its_memory_is_said_to_be_one(folder):
    storage = CudaStorage(Unshareable(folder), 0, folder / "shm")
    with pytest.raises(
        CudaUnavailable, match=r"cudaErrorNotSupported.*WSL.*--device cpu"
    ) as caught:
        storage.create(LAYOUT, 0, RECORDS)
    assert caught.value.metadata["cuda_error"] == "cudaErrorNotSupported"
    assert objects(folder) == allocations(folder) == []


class Dying(FakeCuda):
    def free(self, device, address):
        raise CudaError(46, "cudaErrorDevicesUnavailable", "devices unavailable")


def test_a_device_that_has_failed_does_not_keep_the_rest_from_being_removed(folder):
    pool = CudaStorage(Dying(folder), 0, folder / "shm").create(LAYOUT, 0, RECORDS)
    pool.close()
    assert objects(folder) == []


class Failing(FakeCuda):
    def memory_info(self, device):
        raise CudaError(214, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered")


def test_a_device_that_fails_is_said_to_fail(folder):
    storage = CudaStorage(Failing(folder), 0, folder / "shm")
    options = ManagerOptions(0, 16, kv_memory_share=0.5)
    for ask in (
        lambda: storage.check_room(1),
        lambda: PageManager(options, storage).attach_pool(SHAPE),
        lambda: storage.create(LAYOUT, 0, RECORDS),
    ):
        with pytest.raises(CudaUnavailable, match=r"ECC.*nvidia-smi.*--device cpu"):
            ask()
    assert objects(folder) == allocations(folder) == []


@pytest.mark.parametrize(
    ("visible", "device", "words"),
    [
        (None, 2, r"cuda:2.*2 CUDA devices \(cuda:0 to cuda:1\).*CUDA_VISIBLE_DEVICES"),
        ([1], 1, r"cuda:1.*1 CUDA devices"),
        ([], 0, r"0 CUDA devices \(none\).*--device cpu"),
    ],
)
def test_a_device_that_is_not_there_is_refused_at_once(folder, visible, device, words):
    with pytest.raises(CudaUnavailable, match=words):
        CudaStorage(FakeCuda(folder, visible), device, folder / "shm")


def test_a_device_is_known_by_its_uuid_and_not_by_its_number(folder):
    first, second = FakeCuda(folder), FakeCuda(folder, [1, 0])
    assert first.device_uuid(0) == second.device_uuid(1)
    assert first.device_uuid(1) == second.device_uuid(0)


def test_a_share_is_of_what_is_free_when_the_pool_is_made(storage, cuda):
    cuda.malloc(0, MEMORY // 2)  # weights
    options = ManagerOptions(0, 16, kv_memory_share=0.5)
    manager = PageManager(options, storage)
    handle = manager.attach_pool(SHAPE)
    assert handle.layout.num_blocks == MEMORY // 4 // LAYOUT.block_bytes
    assert handle.size_bytes == handle.layout.pool_bytes
    manager.close()


def test_all_of_the_free_memory_can_be_had(storage, cuda):
    cuda.malloc(0, MIB)  # what is left is no multiple of CUDA's granule
    manager = PageManager(ManagerOptions(0, 16, kv_memory_share=1.0), storage)
    handle = manager.attach_pool(SHAPE)
    assert handle.size_bytes == (MEMORY - 2 * MIB) // LAYOUT.block_bytes * LAYOUT.block_bytes
    manager.close()


def test_the_next_manager_finds_nothing_and_its_pool_is_another_one(storage, folder, plan):
    options = ManagerOptions(LAYOUT.pool_bytes, 16, host_memory_bytes=2 * LAYOUT.block_bytes)
    first = PageManager(options, storage)
    handle = first.attach_pool(SHAPE)
    first.open_sequences([plan("a", 40)])
    first.commit_blocks([CommitPlan("a", 40)])
    first.leave()  # as for a pool that can stay
    assert objects(folder) == allocations(folder) == []
    second = PageManager(options, storage)
    assert (second.recovered, second.is_attached) == ("", False)
    again = second.attach_pool(SHAPE)
    assert again.generation != handle.generation
    assert again.memory != handle.memory
    second.open_sequences([plan("a", 40)])
    assert second.stats().num_hit_tokens == 0
    assert second.audit() == []
    second.close()


def test_without_cupy_the_text_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(CudaUnavailable, match=r"pip install -e '\.\[cuda\]' \(brings cupy-cuda13x"):
        cupy_runtime.connect()


@pytest.mark.parametrize(
    ("dtype", "token_bytes"),
    [
        ("float32", 2 * 2 * 2 * 8 * 4),
        ("float16", 2 * 2 * 2 * 8 * 2),
        ("bfloat16", 2 * 2 * 2 * 8 * 2),
        ("fp8_e4m3", 2 * 2 * 2 * (8 + 4)),
        ("int8", 2 * 2 * 2 * (8 + 4)),
    ],
)
def test_bytes_of_a_token_include_the_scales_of_its_heads(dtype, token_bytes):
    shape = dataclasses.replace(SHAPE, dtype=dtype)
    assert shape.token_bytes == token_bytes
    assert PoolLayout(shape, 16, 3).pool_bytes == 3 * 16 * token_bytes
