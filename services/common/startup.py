"""How a binary reports that it is starting, ready or unable to start.

Under the supervisor, reports go as JSON lines to an inherited file descriptor; on a
terminal, as a progress bar; otherwise into the log.
"""

from __future__ import annotations

import json
import os
import sys
from types import TracebackType
from typing import Any

import structlog
from tqdm import tqdm

STATUS_FD = "QUIRE_STATUS_FD"

_log = structlog.get_logger()


class StartupError(Exception):
    """The binary cannot start. The text is one line and names the cure."""


class StartupReport:
    """Progress, then `ready` or `failed`; one of the two is sent exactly once."""

    def __init__(self) -> None:
        fd = os.environ.pop(STATUS_FD, None)
        self._pipe = os.fdopen(int(fd), "w", buffering=1) if fd else None
        self._bar: Any | None = None
        self._stage = ""

    def progress(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` units of `stage` are finished."""
        if self._pipe is not None:
            self._send({"stage": stage, "done": done, "total": total})
            return
        if stage != self._stage:
            self._stage = stage
            self._close_bar()
            if sys.stderr.isatty():
                self._bar = tqdm(total=total, desc=stage, leave=False)
            else:
                _log.info("starting", stage=stage)
        if self._bar is not None:
            self._bar.update(done - self._bar.n)

    def ready(self, **facts: object) -> None:
        self._close_bar()
        self._send({"ready": True})
        _log.info("ready", **facts)

    def failed(self, message: str) -> None:
        self._close_bar()
        if self._pipe is not None:
            self._send({"failed": message})
        else:
            print(f"quire: {message}", file=sys.stderr)  # noqa: T201 - for a person

    def _send(self, report: dict[str, object]) -> None:
        if self._pipe is not None:
            try:
                self._pipe.write(json.dumps(report) + "\n")
            except OSError:  # the supervisor is gone; its death ends us by signal
                self._pipe = None

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> StartupReport:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close_bar()
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
