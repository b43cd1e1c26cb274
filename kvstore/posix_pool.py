"""Page pools in POSIX shared memory.

An object lives in /dev/shm under `quire-<random>` and its owner holds an exclusive
flock on it. The kernel drops the lock with the owner, however it dies, so an object
whose lock is free is a leftover; the next owner sweeps it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from pathlib import Path

from kvstore.errors import NoRoomForPool

SHM_DIRECTORY = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory is, on Linux
NAME_PREFIX = "quire-"


class PosixPool:
    """A shared memory object that this process owns until `close`.

    The owner never maps it: its pages are the clients' business, and an unmapped pool
    does not count in the owner's resident memory.
    """

    offset_bytes = 0

    def __init__(self, path: Path, descriptor: int) -> None:
        """Use `create`. Takes over `descriptor`, which holds the lock on `path`."""
        self.name = path.name
        self._path = path
        self._descriptor: int | None = descriptor

    @classmethod
    def create(cls, size_bytes: int, directory: Path = SHM_DIRECTORY) -> PosixPool:
        """Sweep leftovers, then make and reserve an object of `size_bytes`.

        Raises:
            NoRoomForPool: the memory does not hold it. Nothing is left behind.
        """
        sweep(directory)
        check_room(size_bytes, directory)
        path, descriptor = _create_locked(directory)
        pool = cls(path, descriptor)
        try:
            # Reserves the pages: a sparse object would kill its writer later (SIGBUS).
            os.posix_fallocate(descriptor, 0, size_bytes)
        except OSError as error:
            pool.close()
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise _no_room(size_bytes, _available_bytes(directory), directory) from None
            raise
        return pool

    def close(self) -> None:
        """Remove the object. Clients keep what they have mapped. Safe to repeat."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        # Unlink before the lock goes, or a sweeper could meet a name that is being removed.
        self._path.unlink(missing_ok=True)
        os.close(descriptor)


def sweep(directory: Path = SHM_DIRECTORY) -> list[str]:
    """Remove objects whose owner is gone; their names. Those in use are never touched."""
    swept = []
    for path in sorted(directory.glob(f"{NAME_PREFIX}*")):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # gone meanwhile, or another user's
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            swept.append(path.name)
        except OSError:  # its owner lives, or it is not ours to remove
            continue
        finally:
            os.close(descriptor)
    return swept


def _create_locked(directory: Path) -> tuple[Path, int]:
    """A new empty object with its lock held."""
    while True:
        path = directory / f"{NAME_PREFIX}{secrets.token_hex(8)}"
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
