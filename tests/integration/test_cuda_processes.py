"""A pool on a device between real processes: one kvstore, one compute worker and two.

The device is a fake one (kvstore.fake_cuda, compute.fake_cuda); the processes, the gRPC
between them and their deaths are real. tests/gpu has the same with a GPU.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from compute.cuda_pool import CudaIpcMapper
from compute.errors import PoolUnavailable
from compute.fake_cuda import FakeCuda
from compute.pool import AttachedPool
from compute.types import KvShape
from kvstore.fake_cuda import FakeCuda as ExportingCuda
from services.compute.pool_provider import GrpcPoolProvider
from tests.cuda_worker import WorkerProcess
from tests.integration.kvstore_process import BLOCK_BYTES, BLOCK_SIZE, KvStoreProcess

SHAPE = KvShape(num_layers=1, num_kv_heads=1, head_size=8, dtype="float32")
NUM_BLOCKS = 16
MEMORY = 8 * 2**20


class CudaKvStoreProcess(KvStoreProcess):
    """On the first device of a machine's folder, beside which is its socket."""

    def __init__(self, machine: Path, folder: Path, num_host_blocks: int = 0, **flags) -> None:
        super().__init__(folder, NUM_BLOCKS, num_host_blocks, **{"device": "cuda", **flags})
        self._machine = machine

    def launch(self, kill_point: str = "") -> None:
        assert not kill_point
        command = [sys.executable, "-P", "-m", "tests.fake_cuda_kvstore", str(self._machine)]
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [*command, *self._flags],
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,
            )


@pytest.fixture
def machine() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-") as path:
        ExportingCuda.build(Path(path), [MEMORY, MEMORY])
        yield Path(path)


@pytest.fixture
def kvstores(machine, tmp_path):
    """kvstores(**flags) starts one; the next takes the place of the last."""
    made = []

    def start(**flags) -> CudaKvStoreProcess:
        made.append(CudaKvStoreProcess(machine, tmp_path, **flags))
        made[-1].start()
        return made[-1]

    yield start
    for process in made:
        process.end()


@pytest.fixture
def provider(tmp_path) -> Iterator[GrpcPoolProvider]:
    provider = GrpcPoolProvider(f"unix:{tmp_path / 'kv.sock'}")
    yield provider
    provider.close()


@pytest.fixture
def workers(machine, tmp_path):
    made = []

    def start() -> WorkerProcess:
        made.append(WorkerProcess(machine, f"unix:{tmp_path / 'kv.sock'}"))
        return made[-1]

    yield start
    for worker in made:
        worker.end()


def attach(provider, machine, shape=SHAPE) -> AttachedPool:
    """In this process, as a compute worker would."""
    return AttachedPool(provider.attach_pool(shape), shape, CudaIpcMapper(FakeCuda(machine), 0))


def pages(machine: Path) -> list[Path]:
    return list((machine / "device-0").iterdir())


def test_two_processes_share_the_bytes_of_a_device_both_ways(kvstores, provider, machine):
    kvstores()
    pool = attach(provider, machine)
    assert pool.handle.layout.num_blocks == NUM_BLOCKS
    (file,) = pages(machine)
    pool.tensor[3] = 2.5
    stored = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.float32)
    per_block = BLOCK_BYTES // 4
    assert (stored[3 * per_block : 4 * per_block] == 2.5).all()
    assert torch.count_nonzero(stored) == per_block
    with file.open("r+b") as memory:
        memory.write(torch.full((per_block,), 9.0).numpy().tobytes())
    assert (pool.tensor[0] == 9.0).all()
    pool.close()


def test_two_workers_map_one_pool_and_either_may_come_and_go(kvstores, workers, provider, machine):
    kvstores()
    prefill, decode = workers(), attach(provider, machine)
    shape = dataclasses.asdict(SHAPE)
    assert prefill.call("attach", shape) == decode.handle.generation
    prefill.call("fill", 7, 1.5)
    assert (decode.tensor[7] == 1.5).all()
    decode.tensor[8] = 2.5
    assert prefill.call("read", 8) == [2.5]
    prefill.end()
    assert (decode.tensor[7] == 1.5).all()
    successor = workers()  # a new version, say
    assert successor.call("attach", shape) == decode.handle.generation
    assert successor.call("read", 7) == [1.5]
    decode.close()
    successor.call("fill", 7, 3.5)
    assert attach(provider, machine).tensor[7].unique().tolist() == [3.5]


def test_quantized_pools_have_their_scales_on_the_device_too(kvstores, provider, machine):
    shape = dataclasses.replace(SHAPE, num_kv_heads=2, dtype="int8")
    kvstores()
    first, second = attach(provider, machine, shape), attach(provider, machine, shape)
    layout = first.handle.layout
    assert layout.block_bytes == 2 * BLOCK_SIZE * 2 * (8 + 4)
    assert layout.num_blocks == NUM_BLOCKS * BLOCK_BYTES // layout.block_bytes
    first.tensor[5], first.scales[5] = -3, 0.5
    assert (second.tensor[5] == -3).all()
    assert (second.scales[5] == 0.5).all()
    assert not second.blocks[6].any()


def test_a_killed_kvstore_takes_its_pool_along_and_workers_attach_the_next_one(
    kvstores, workers, provider, machine
):
    first = kvstores()
    pool, other = attach(provider, machine), workers()
    shape = dataclasses.asdict(SHAPE)
    other.call("attach", shape)
    pool.tensor[1] = 4.0
    assert not pool.is_orphaned()
    first.kill()
    assert pool.is_orphaned()
    assert other.call("is_orphaned")
    with pytest.raises(PoolUnavailable, match=r"has ended.*start the kvstore again"):
        AttachedPool(pool.handle, SHAPE, CudaIpcMapper(FakeCuda(machine), 0))
    pool.close()
    other.call("close")
    kvstores()
    again = attach(provider, machine)
    assert again.handle.generation != pool.handle.generation
    assert not again.tensor.any()
    assert len(pages(machine)) == 1
    assert other.call("attach", shape) == again.handle.generation
    other.call("fill", 1, 5.0)
    assert (again.tensor[1] == 5.0).all()


def test_what_belongs_to_a_devices_pool_is_swept_and_found_by_no_kvstore(
    kvstores, provider, machine
):
    first = kvstores(num_host_blocks=4)
    handle = attach(provider, machine).handle
    name = handle.host.memory.name.removesuffix(".host")
    assert handle.host.size_bytes == 4 * BLOCK_BYTES
    left = {path.suffix for path in Path("/dev/shm").glob(f"{name}*")}
    assert left == {"", ".host", ".frames", ".journal"}
    first.kill()
    second = kvstores(device="cpu")  # at the same address, where it looks for its own
    assert not list(Path("/dev/shm").glob(f"{name}*"))
    again = provider.attach_pool(SHAPE)
    assert again.generation != handle.generation
    assert again.memory.name != name
    assert second.stop() == 0


def test_another_layout_is_refused_and_nothing_is_mapped(kvstores, workers, provider, machine):
    kvstores()
    attach(provider, machine)
    wider = dataclasses.asdict(dataclasses.replace(SHAPE, dtype="float16"))
    with pytest.raises(RuntimeError, match="LAYOUT_MISMATCH: the pool is for"):
        workers().call("attach", wider)


def test_a_container_of_its_own_is_told_what_to_share(kvstores, workers):
    kvstores()
    worker = workers()
    # CUDA refuses as it does between containers; the namespaces of this test are one, so
    # that it can only be told to look at them.
    with pytest.raises(RuntimeError, match=r"POOL_UNAVAILABLE.*share PID and IPC namespaces"):
        worker.call("attach", dataclasses.asdict(SHAPE), is_isolated=True)


def test_a_pool_that_the_device_has_no_room_for_is_refused_at_the_start(machine, tmp_path):
    process = CudaKvStoreProcess(machine, tmp_path)
    process._flags.append(f"--kv-memory={MEMORY + 1}")
    process.launch()
    assert process.wait() == 1
    assert f"needs {MEMORY + 1} bytes on cuda:0, {MEMORY} of {MEMORY} are free" in (
        process.log.read_text()
    )


def test_a_share_of_a_device_is_of_what_is_free(machine, tmp_path, provider):
    process = CudaKvStoreProcess(machine, tmp_path)
    process._flags.append("--kv-memory=50%")
    process.start()
    handle = provider.attach_pool(SHAPE)
    assert handle.size_bytes == MEMORY // 2
    assert process.stop() == 0
    assert pages(machine) == []


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--device=cuda:2", "this process sees 2 CUDA devices (cuda:0 to cuda:1)"),
        ("--keep-pool", "--keep-pool: a pool on cuda ends with its kvstore"),
    ],
)
def test_what_a_device_cannot_do_is_refused_at_the_start(machine, tmp_path, flag, words):
    process = CudaKvStoreProcess(machine, tmp_path)
    process._flags.append(flag)
    process.launch()
    assert process.wait() == 1
    assert words in process.log.read_text()
