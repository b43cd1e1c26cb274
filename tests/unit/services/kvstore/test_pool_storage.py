"""Where a kvstore puts its pool, by its settings."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvstore.cuda_pool import CudaStorage
from kvstore.errors import NoRoomForPool
from kvstore.fake_cuda import FakeCuda
from kvstore.posix_pool import PosixStorage
from services.common import config
from services.common.startup import StartupError
from services.kvstore import pool_storage
from services.kvstore.__main__ import manager_options

MEMORY = 2**26


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-") as path:
        FakeCuda.build(Path(path), [MEMORY])
        yield FakeCuda(Path(path))


def settings(*flags: str) -> config.KvStoreSettings:
    return config.load(config.KvStoreSettings, "serve-kvstore", list(flags))


def unasked():
    raise AssertionError("CUDA was asked for")


def test_without_a_device_cuda_is_not_asked_for():
    assert isinstance(pool_storage.find(settings(), unasked), PosixStorage)


def test_with_one_the_pool_is_there(cuda):
    assert isinstance(pool_storage.find(settings("--device=cuda"), lambda: cuda), CudaStorage)


def test_a_pool_on_a_device_cannot_be_kept(cuda):
    with pytest.raises(StartupError, match=r"--keep-pool.*--device cpu"):
        pool_storage.find(settings("--device=cuda:0", "--keep-pool"), lambda: cuda)


def test_a_share_is_of_the_machine_on_a_cpu_and_of_what_is_free_on_a_device():
    options = manager_options(settings("--kv-memory=25%"))
    assert options.kv_memory_bytes == psutil.virtual_memory().total // 4
    assert options.kv_memory_share == 0
    options = manager_options(settings("--kv-memory=25%", "--device=cuda"))
    assert (options.kv_memory_bytes, options.kv_memory_share) == (0, 0.25)
    options = manager_options(settings("--kv-memory=1GiB", "--device=cuda"))
    assert (options.kv_memory_bytes, options.kv_memory_share) == (2**30, 0)


def test_room_is_looked_for_where_it_is_needed(cuda):
    for flags, words in (
        ([f"--kv-memory={MEMORY + 1}", "--device=cuda"], "on cuda:0"),
        (["--kv-memory=90%", "--host-memory=900TB", "--device=cuda"], "/dev/shm"),
        (["--kv-memory=900TB"], "/dev/shm"),
    ):
        chosen = settings(*flags)
        storage = pool_storage.find(chosen, lambda: cuda)
        with pytest.raises(NoRoomForPool, match=words):
            pool_storage.check(storage, manager_options(chosen))
    chosen = settings(f"--kv-memory={MEMORY}", "--device=cuda")
    pool_storage.check(pool_storage.find(chosen, lambda: cuda), manager_options(chosen))
