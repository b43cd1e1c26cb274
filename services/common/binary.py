"""What every service binary does around its own work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import structlog

from services.common import logs
from services.common.config import LogSettings
from services.common.startup import StartupError, StartupReport

S = TypeVar("S", bound=LogSettings)

_log = structlog.get_logger()


def run(
    name: str, settings: S, serve: Callable[[S, StartupReport], Coroutine[Any, Any, None]]
) -> int:
    """Run `serve` until it returns. The exit status: 0, or 1 if it could not start.

    An error with a `reason` (ours, with a text for people) becomes one line; any
    other is a bug and leaves with its traceback in the log.
    """
    logs.configure(settings.log_level, settings.log_format, name)
    with StartupReport() as report:
        try:
            asyncio.run(serve(settings, report))
        except StartupError as error:
            report.failed(str(error))
            return 1
        except Exception as error:
            if not hasattr(error, "reason"):
                _log.exception("unexpected error")
            report.failed(" ".join(str(error).split()) or repr(error))
            return 1
    return 0
