"""A pool on a real GPU between real processes, over legacy CUDA IPC.

Without a GPU the same is in tests/integration/test_cuda_processes.py, over a fake one.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

import pytest
import torch

from compute import cupy_runtime
from compute.block_copies import run_copies
from compute.cuda_pool import CudaIpcMapper
from compute.errors import CudaUnavailable, PoolUnavailable
from compute.kernels.reference import ReferenceKernels
from compute.pool import AttachedPool
from compute.types import BlockCopy, KvShape
from kvstore import cupy_runtime as exporting
from kvstore.cuda_pool import CudaStorage
from kvstore.errors import NoRoomForPool
from kvstore.types import PoolLayout
from services.compute.pool_provider import GrpcPoolProvider
from tests.cuda_worker import WorkerProcess
from tests.integration.kvstore_process import KvStoreProcess

try:
    CUDA = cupy_runtime.connect()
    WHY = ""
except CudaUnavailable as error:
    CUDA, WHY = None, str(error)

pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY)

SHAPE = KvShape(num_layers=1, num_kv_heads=1, head_size=8, dtype="float32")
NUM_BLOCKS = 16


@pytest.fixture
def kvstore(tmp_path) -> Iterator[KvStoreProcess]:
    process = KvStoreProcess(tmp_path, NUM_BLOCKS, 4, device="cuda")
    process.start()
    yield process
    process.end()


@pytest.fixture
def provider(kvstore) -> Iterator[GrpcPoolProvider]:
    provider = GrpcPoolProvider(kvstore.address)
    yield provider
    provider.close()


@pytest.fixture
def worker(kvstore) -> Iterator[WorkerProcess]:
    process = WorkerProcess("cuda", kvstore.address)
    yield process
    process.end()


def attach(provider, shape=SHAPE) -> AttachedPool:
    return AttachedPool(provider.attach_pool(shape), shape, CudaIpcMapper(CUDA, 0))


def test_three_processes_share_the_bytes_of_a_device(provider, worker):
    pool = attach(provider)
    assert pool.tensor.is_cuda
    assert not pool.tensor.any()
    assert worker.call("attach", dataclasses.asdict(SHAPE)) == pool.handle.generation
    worker.call("fill", 7, 1.5)
    assert (pool.tensor[7] == 1.5).all()
    pool.tensor[8] = 2.5
    torch.cuda.synchronize()
    assert worker.call("read", 8) == [2.5]
    assert torch.count_nonzero(pool.tensor) == 2 * pool.tensor[0].numel()
    worker.end()
    assert (pool.tensor[7] == 1.5).all()
    pool.close()


def test_two_attachments_of_one_process_share_a_mapping(provider):
    first, second = attach(provider), attach(provider)
    assert first.tensor.data_ptr() == second.tensor.data_ptr()
    first.close()
    second.tensor.fill_(3.0)
    assert (second.tensor == 3.0).all()
    second.close()


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
def test_scales_travel_with_copies_on_the_device_and_to_the_host_pool(provider, dtype):
    shape = dataclasses.replace(SHAPE, num_kv_heads=2, dtype=dtype)
    pool = attach(provider, shape)
    host = AttachedPool(pool.handle.host, shape)
    pool.blocks[1] = torch.randint(0, 120, pool.blocks[1].shape, dtype=torch.uint8).cuda()
    pool.scales[1] = 0.5
    kept = pool.blocks[1].clone()
    first_host = pool.handle.layout.num_blocks
    copies = [BlockCopy(1, 2), BlockCopy(2, first_host), BlockCopy(first_host, 3)]
    run_copies(ReferenceKernels(), pool.blocks, host.blocks, copies)
    assert torch.equal(pool.blocks[2], kept)
    assert torch.equal(pool.blocks[3], kept)
    assert (pool.scales[3] == 0.5).all()
    assert (host.scales[0] == 0.5).all()
    pool.close()
    host.close()


def test_a_killed_kvstore_orphans_its_pool_and_the_next_one_is_attached(kvstore, provider):
    pool = attach(provider)
    pool.tensor.fill_(1.0)
    assert not pool.is_orphaned()
    kvstore.kill()
    assert pool.is_orphaned()
    pool.close()
    with pytest.raises(PoolUnavailable, match="start the kvstore again") as caught:
        AttachedPool(pool.handle, SHAPE, CudaIpcMapper(CUDA, 0))
    assert caught.value.metadata["cuda_error"].startswith("cudaError")
    kvstore.start()
    again = attach(provider)
    assert again.handle.generation != pool.handle.generation
    assert not again.tensor.any()
    again.close()


def test_a_handle_that_is_none_leads_to_the_cure(provider):
    handle = provider.attach_pool(SHAPE)
    memory = dataclasses.replace(handle.memory, handle=b"x" * 64)
    with pytest.raises(PoolUnavailable, match="share PID and IPC namespaces"):
        AttachedPool(dataclasses.replace(handle, memory=memory), SHAPE, CudaIpcMapper(CUDA, 0))


def test_memory_of_this_process_cannot_be_opened_by_it(provider):
    handle = provider.attach_pool(SHAPE)
    runtime = exporting.connect()
    address = runtime.malloc(0, 2 * 2**20)
    memory = dataclasses.replace(
        handle.memory, handle=runtime.ipc_handle(0, address), exporter_pid=os.getpid()
    )
    with pytest.raises(PoolUnavailable, match="processes of their own"):
        AttachedPool(dataclasses.replace(handle, memory=memory), SHAPE, CudaIpcMapper(CUDA, 0))
    runtime.free(0, address)


def test_the_domains_see_the_same_device_and_its_memory(tmp_path):
    runtime = exporting.connect()
    assert runtime.device_uuid(0) == CUDA.device_uuid(0)
    free, total = runtime.memory_info(0)
    assert 0 < free <= total
    storage = CudaStorage(runtime, 0)
    block_bytes = PoolLayout(SHAPE, 8, 1).block_bytes
    with pytest.raises(NoRoomForPool, match="--kv-memory"):
        storage.create(PoolLayout(SHAPE, 8, 2 * total // block_bytes), 0, 4096)
    assert runtime.memory_info(0)[0] > free // 2
