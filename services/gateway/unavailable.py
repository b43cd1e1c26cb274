"""What clients are told of a worker's errors."""

from __future__ import annotations

import grpc
import structlog

from gateway.errors import WorkerUnavailable
from services.common.errors import error_details

_log = structlog.get_logger()


def unavailable(worker: str, error: grpc.RpcError) -> WorkerUnavailable:
    """The error of a call to a worker.

    The worker's own words are for people. Those of the transport name sockets and addresses,
    which are for the log alone.
    """
    details = error_details(error)
    if details.reason:
        return WorkerUnavailable(f"{worker}: {details.message}")
    _log.debug("call failed", worker=worker, code=details.code.name, details=details.message)
    if details.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return WorkerUnavailable(f"{worker} does not answer")
    return WorkerUnavailable(f"{worker} is out of reach")
