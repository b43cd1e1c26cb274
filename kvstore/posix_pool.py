"""Page pools in POSIX shared memory.

A pool is a group of objects in /dev/shm:

    quire-<tag>-<random>            the pages; its owner holds an exclusive flock on it
    quire-<tag>-<random>.host       the host pool, if there is one
    quire-<tag>-<random>.frames     the frame records
    quire-<tag>-<random>.journal    sequences and pins

The kernel drops the lock with the owner, however it dies. A pool whose lock is free is
what a dead owner left: the next owner of the same instance takes it over, and others sweep
it, at once if it belongs to no instance, else when it was long enough without an owner.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from kvstore.errors import NoRoomForPool
from kvstore.ports import Exported
from kvstore.posix_journal import PosixJournal
from kvstore.types import PoolLayout, PosixMemory

SHM_DIRECTORY = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory is, on Linux
NAME_PREFIX = "quire-"
GRACE_SECONDS = 900.0  # that a pool waits for its instance
_PARTS = ("host", "frames", "journal")


class PosixPool:
    """A group of shared memory objects that this process owns until `close`.

    The owner maps the frame records and nothing else: the pages are the clients' business,
    and what is not mapped does not count in the owner's resident memory.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        """Use PosixStorage. Takes over `descriptor`, which holds the lock on `path`."""
        self.name = path.name
        self._path = path
        self._descriptor: int | None = descriptor
        self._records: mmap.mmap | None = None

    def export(self) -> Exported:
        return Exported(PosixMemory(self.name))

    def export_host(self) -> Exported | None:
        host = _part(self._path, "host")
        return Exported(PosixMemory(host.name)) if host.exists() else None

    @property
    def frame_records(self) -> memoryview:
        if self._records is None:
            with _part(self._path, "frames").open("r+b") as file:
                self._records = mmap.mmap(file.fileno(), 0)
        return memoryview(self._records)

    @property
    def journal(self) -> PosixJournal:
        return PosixJournal(_part(self._path, "journal"))

    def reserve(self, part: str, size_bytes: int) -> None:
        """Make one of the objects, of this size. Raises NoRoomForPool."""
        path = _part(self._path, part) if part else self._path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            # Reserves the pages: a sparse object would kill its writer later (SIGBUS).
            if size_bytes:
                os.posix_fallocate(descriptor, 0, size_bytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                directory = self._path.parent
                raise _no_room(size_bytes, _available_bytes(directory), directory) from None
            raise
        finally:
            os.close(descriptor)

    def touch(self) -> None:
        """Say that the pool is in use, which counts when its owner is gone."""
        if self._descriptor is not None:
            os.utime(self._descriptor)

    def leave(self) -> None:
        """Give up the pool and let it stay for the next owner. Safe to repeat."""
        if self._descriptor is not None:
            self.touch()
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def close(self) -> None:
        """Remove the objects. Clients keep what they have mapped. Safe to repeat."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        # Unlink before the lock goes, or a sweeper could meet a name that is being removed.
        _unlink(self._path)
        os.close(descriptor)


class PosixStorage:
    """The pools of one instance. An instance is whatever is restarted as the same one."""

    def __init__(self, instance: str = "", directory: Path = SHM_DIRECTORY) -> None:
        """`instance`: any text; empty: what is made here is found by nobody again."""
        tag = hashlib.sha256(instance.encode()).hexdigest()[:8] if instance else "none"
        self._prefix = f"{NAME_PREFIX}{tag}-"
        self._directory = directory
        self._instance = instance

    def create(self, layout: PoolLayout, num_host_blocks: int, records_bytes: int) -> PosixPool:
        """Sweep leftovers, then make and reserve a pool.

        Raises:
            NoRoomForPool: the memory does not hold it. Nothing is left behind.
        """
        return self.create_parts(
            layout.pool_bytes, num_host_blocks * layout.block_bytes, records_bytes
        )

    def create_parts(self, pages_bytes: int, host_bytes: int, records_bytes: int) -> PosixPool:
        """As `create`; without pages if they are elsewhere."""
        sizes = {"": pages_bytes, "frames": records_bytes, "journal": 0}
        if host_bytes:
            sizes["host"] = host_bytes
        sweep(self._directory)
        check_room(sum(sizes.values()), self._directory)
        pool = PosixPool(*_create_locked(self._directory, self._prefix))
        try:
            for part, size_bytes in sizes.items():
                pool.reserve(part, size_bytes)
        except BaseException:
            pool.close()
            raise
        return pool

    def free_bytes(self) -> int:
        return _available_bytes(self._directory)

    def recover(self) -> PosixPool | None:
        """The pool that the last owner of this instance left, if there is one."""
        if not self._instance:
            return None
        paths = [p for p in self._directory.glob(f"{self._prefix}*") if not p.suffix]
        for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True):
            descriptor = _lock(path)
            if descriptor is None:
                continue
            if all(_part(path, part).exists() for part in ("frames", "journal")):
                return PosixPool(path, descriptor)
            _unlink(path)  # its owner died while it made it
            os.close(descriptor)
        return None


def sweep(directory: Path = SHM_DIRECTORY) -> list[str]:
    """Remove pools whose owner is gone for good; their names. Those in use stay."""
    swept = []
    for path in sorted(directory.glob(f"{NAME_PREFIX}*")):
        if path.suffix:
            continue
        descriptor = _lock(path)
        if descriptor is None:
            continue
        try:
            unused = time.time() - os.fstat(descriptor).st_mtime
            if path.name.startswith(f"{NAME_PREFIX}none-") or unused > GRACE_SECONDS:
                _unlink(path)
                swept.append(path.name)
        except OSError:  # it is not ours to remove
            continue
        finally:
            os.close(descriptor)
    return swept


def _lock(path: Path) -> int | None:
    """A descriptor with the lock on an object; None if somebody else has it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:  # gone meanwhile, or another user's
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            return descriptor
    except OSError:  # its owner lives
        pass
    os.close(descriptor)
    return None


def _part(path: Path, part: str) -> Path:
    return path.with_name(f"{path.name}.{part}")


def _objects(path: Path) -> Iterator[Path]:
    """The objects of a pool, the one that stands for all of them last."""
    for part in _PARTS:
        yield _part(path, part)
        yield _part(path, part + "-new")
    yield path


def _unlink(path: Path) -> None:
    for each in _objects(path):
        each.unlink(missing_ok=True)


def _create_locked(directory: Path, prefix: str) -> tuple[Path, int]:
    """A new empty object with its lock held."""
    while True:
        path = directory / f"{prefix}{secrets.token_hex(8)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        # Another process swept it between its creation and our lock.
        os.close(descriptor)


def check_room(size_bytes: int, directory: Path = SHM_DIRECTORY) -> None:
    """Raises NoRoomForPool if a pool of `size_bytes` would not fit now."""
    # Asked first because the kernel may kill a process that fills memory to the brim
    # instead of telling it that there is none left.
    available = _available_bytes(directory)
    if size_bytes > available:
        raise _no_room(size_bytes, available, directory)


def _available_bytes(directory: Path) -> int:
    """The lesser of what the file system and what the machine's memory can take."""
    status = os.statvfs(directory)
    available = status.f_bavail * status.f_frsize
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            available = min(available, int(line.split()[1]) * 1024)
    return available


def _no_room(needed: int, available: int, directory: Path) -> NoRoomForPool:
    return NoRoomForPool(
        f"the page pool needs {needed} bytes of shared memory, {available} are available in "
        f"{directory}; choose a smaller --kv-memory or make {directory} larger",
        needed_bytes=needed,
        available_bytes=available,
    )
