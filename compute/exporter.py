"""The process that has allocated what we map, and whether it still runs."""

from __future__ import annotations

import os
import select
from pathlib import Path


class Exporter:
    """A process of this machine, watched from construction to `close` if it can be.

    It can be in our own PID namespace only; elsewhere its number means nothing.
    """

    def __init__(self, pid: int, pid_namespace: int) -> None:
        """`pid_namespace`: inode number of the namespace that has this pid."""
        self.pid = pid
        self.is_in_our_namespace = pid_namespace == Path("/proc/self/ns/pid").stat().st_ino
        self._has_ended = False
        self._descriptor: int | None = None
        if self.is_in_our_namespace:
            try:
                # Another process may get the number of one that has ended, and never its
                # descriptor.
                self._descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._has_ended = True
            except OSError:  # a kernel or a sandbox without it
                return

    def has_ended(self) -> bool:
        """False also if we cannot know."""
        if self._descriptor is not None and not self._has_ended:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            self._has_ended = bool(poll.poll(0))
        return self._has_ended

    def close(self) -> None:
        """Watch it no longer. Safe to repeat."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)
