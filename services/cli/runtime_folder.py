"""The private folder of a supervisor, with its services' sockets."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "quire-"
_LOCK = "lock"


@contextlib.contextmanager
def runtime_folder() -> Iterator[Path]:
    """A new folder that nobody else may enter, removed at the end.

    A supervisor that is killed leaves its folder behind, but not its lock: the next one
    sweeps it.
    """
    parent = Path(tempfile.gettempdir())
    _sweep(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # mode 0700
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def running_folders() -> list[Path]:
    """The folders of this user's supervisors that run, latest first."""
    found = []
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            folder = lock.parent.lstat()
            # Anybody may make a folder of that name, and wait there for whoever connects.
            is_private = stat.S_ISDIR(folder.st_mode) and folder.st_uid == os.getuid()
            if is_private and _is_locked(lock):
                found.append((folder.st_ctime_ns, lock.parent))
    return [path for _, path in sorted(found, reverse=True)]


def _is_locked(lock: Path) -> bool:
    descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _sweep(parent: Path) -> None:
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # gone meanwhile, or another user's
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:  # its supervisor lives
            continue
        finally:
            os.close(descriptor)
