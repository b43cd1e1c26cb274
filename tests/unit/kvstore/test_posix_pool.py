"""Pools in real shared memory: who owns them, what outlives whom, what is left behind."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from kvstore.attachment import ManagerOptions
from kvstore.errors import NoRoomForPool
from kvstore.manager import PageManager
from kvstore.posix_pool import GRACE_SECONDS, SHM_DIRECTORY, PosixPool, PosixStorage, sweep
from kvstore.types import KvShape, PoolLayout

LAYOUT = PoolLayout(KvShape(1, 1, 8, "float32"), 8, 2048)
SIZE = LAYOUT.pool_bytes
RECORDS = 4096


def create(shm: Path, layout: PoolLayout = LAYOUT, num_host_blocks: int = 0) -> PosixPool:
    return PosixStorage("", shm).create(layout, num_host_blocks, RECORDS)


def objects(pool: PosixPool) -> set[str]:
    return {pool.name, f"{pool.name}.frames", f"{pool.name}.journal"}


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder of our own in shared memory: other pools come and go beside it."""
    with tempfile.TemporaryDirectory(dir=SHM_DIRECTORY, prefix="test-") as folder:
        yield Path(folder)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def start(code: str, *arguments: str) -> subprocess.Popen:
    """A Python process that prints one line when it is as far as the test needs it."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


def kill(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


OWNER = """
    import sys, time
    from pathlib import Path
    from kvstore.posix_pool import PosixStorage
    from kvstore.types import KvShape, PoolLayout
    layout = PoolLayout(KvShape(1, 1, 8, "float32"), 8, 2048)
    pool = PosixStorage(sys.argv[2], Path(sys.argv[1])).create(layout, 0, 4096)
    print(pool.name, flush=True)
    time.sleep(600)
"""

CLIENT = """
    import mmap, os, sys, time
    descriptor = os.open(sys.argv[1], os.O_RDWR)
    memory = mmap.mmap(descriptor, 0)
    os.close(descriptor)
    memory[:] = bytes([int(sys.argv[2])]) * len(memory)
    print(len(memory), flush=True)
    time.sleep(600)
"""


def test_a_pool_is_reserved_zeroed_and_private(shm):
    pool = create(shm)
    path = shm / pool.name
    status = path.stat()
    assert status.st_size == SIZE
    assert status.st_blocks * 512 >= SIZE
    assert status.st_mode & 0o777 == 0o600
    assert path.read_bytes() == bytes(SIZE)
    pool.close()


def test_close_removes_the_object_and_keeps_what_clients_mapped(shm):
    pool = create(shm)
    with (shm / pool.name).open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    memory[0] = 7
    pool.close()
    pool.close()
    assert names(shm) == set()
    assert memory[0] == 7
    memory.close()


def test_a_client_that_attaches_and_dies_leaves_no_trace(shm):
    """Fault P1."""
    pool = create(shm)
    owner = psutil.Process()
    resident = []
    for number in range(1, 6):
        client = start(CLIENT, str(shm / pool.name), str(number))
        assert client.stdout.readline() == f"{SIZE}\n"
        kill(client)
        assert names(shm) == objects(pool)
        with (shm / pool.name).open("rb") as file:
            assert file.read(1)[0] == number  # what it wrote outlives it
        resident.append(owner.memory_info().rss)
    # The pool has 1 MiB; had its pages counted as the owner's, 5 MiB would show.
    assert resident[-1] - resident[0] < SIZE
    pool.close()
    assert names(shm) == set()


def test_the_pool_of_a_killed_owner_is_swept_by_the_next_one(shm):
    owner = start(OWNER, str(shm), "")
    name = owner.stdout.readline().strip()
    assert sweep(shm) == []  # it lives
    kill(owner)
    (shm / "other-file").touch()
    assert names(shm) == {name, f"{name}.frames", f"{name}.journal", "other-file"}
    pool = create(shm)
    assert names(shm) == objects(pool) | {"other-file"}
    pool.close()


def test_a_new_owner_leaves_the_pools_of_living_ones(shm):
    first = create(shm)
    second = create(shm)
    assert names(shm) == objects(first) | objects(second)
    first.close()
    assert names(shm) == objects(second)
    second.close()


def test_a_client_keeps_no_pool_from_being_swept(shm):
    owner = start(OWNER, str(shm), "")
    name = owner.stdout.readline().strip()
    client = start(CLIENT, str(shm / name), "1")
    client.stdout.readline()
    kill(owner)
    assert sweep(shm) == [name]
    kill(client)
    assert names(shm) == set()


def test_no_room_names_the_cure_and_leaves_nothing(shm):
    huge = replace(LAYOUT, num_blocks=900 << 31)
    with pytest.raises(NoRoomForPool, match="--kv-memory") as caught:
        create(shm, huge)
    assert caught.value.metadata["needed_bytes"] == str(huge.pool_bytes + RECORDS)
    assert int(caught.value.metadata["available_bytes"]) < huge.pool_bytes
    assert names(shm) == set()


def test_room_that_vanishes_while_reserving_leaves_nothing(shm, monkeypatch):
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NoRoomForPool):
        create(shm)
    assert names(shm) == set()


def test_an_object_swept_before_its_lock_is_replaced(shm, monkeypatch):
    """Another process may sweep a new object before its owner has locked it."""
    lock, swept = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not swept:
            swept.extend(shm.iterdir())
            swept[0].unlink()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    pool = create(shm)
    assert names(shm) == objects(pool)
    assert pool.name != swept[0].name
    pool.close()


def test_a_manager_keeps_its_pool_in_shared_memory_until_it_closes():
    manager = PageManager(ManagerOptions(SIZE, 16))
    handle = manager.attach_pool(KvShape(2, 1, 8, "float32"))
    path = SHM_DIRECTORY / handle.memory.name
    assert path.stat().st_size == handle.size_bytes
    manager.close()
    assert not path.exists()


def test_the_next_of_an_instance_takes_over_what_the_killed_one_left(shm):
    owner = start(OWNER, str(shm), "here")
    name = owner.stdout.readline().strip()
    here = PosixStorage("here", shm)
    assert here.recover() is None  # it lives
    kill(owner)
    assert sweep(shm) == []  # its instance may come back
    assert PosixStorage("there", shm).recover() is None
    assert PosixStorage("", shm).recover() is None
    pool = here.recover()
    assert pool.name == name
    assert len(pool.frame_records) == 4096
    assert here.recover() is None
    pool.leave()
    assert here.recover().name == name


def test_a_pool_whose_instance_does_not_come_back_is_swept_in_the_end(shm):
    owner = start(OWNER, str(shm), "here")
    name = owner.stdout.readline().strip()
    kill(owner)
    long_ago = time.time() - GRACE_SECONDS - 1
    os.utime(shm / name, (long_ago, long_ago))
    assert sweep(shm) == [name]
    assert names(shm) == set()


def test_a_pool_that_was_never_finished_is_not_taken_over(shm):
    here = PosixStorage("here", shm)
    pool = here.create(LAYOUT, 0, RECORDS)
    (shm / f"{pool.name}.frames").unlink()
    pool.leave()
    assert here.recover() is None
    assert names(shm) == set()


def test_a_host_pool_is_an_object_of_its_own(shm):
    pool = create(shm, num_host_blocks=4)
    host_name = pool.export_host().memory.name
    assert names(shm) == objects(pool) | {host_name}
    assert (shm / host_name).stat().st_size == 4 * LAYOUT.block_bytes
    pool.close()
    assert names(shm) == set()
