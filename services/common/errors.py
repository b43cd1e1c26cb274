"""One table from a domain error's reason to its gRPC code and its HTTP status.

Servers map with `ErrorInterceptor`; clients read back with `error_details`. An
error that is not in the table is a bug: its text stays in the log, and the client
gets a fixed text with the request id.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN = "quire.dev"

_Code = grpc.StatusCode
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Status:
    """How an error looks from outside. `retry_after` in seconds, None: do not retry."""

    code: grpc.StatusCode
    http: int
    type: str  # OpenAI's error type
    reason: str
    message: str
    metadata: dict[str, str] = field(default_factory=dict)
    retry_after: float | None = None


_INVALID = (_Code.INVALID_ARGUMENT, 400, "invalid_request_error")
_MISSING = (_Code.NOT_FOUND, 404, "invalid_request_error")
_CONFLICT = (_Code.ALREADY_EXISTS, 409, "invalid_request_error")
_FORBIDDEN = (_Code.PERMISSION_DENIED, 403, "permission_error")
_EXHAUSTED = (_Code.RESOURCE_EXHAUSTED, 429, "rate_limit_error")
_STALE = (_Code.FAILED_PRECONDITION, 500, "server_error")
_TOO_OLD = (_Code.OUT_OF_RANGE, 500, "server_error")
_DOWN = (_Code.UNAVAILABLE, 503, "server_error")

# Reason -> (gRPC code, HTTP status, OpenAI type).
TABLE: dict[str, tuple[grpc.StatusCode, int, str]] = {
    # gateway
    "INVALID_FIELD": _INVALID,
    "UNSUPPORTED_OPTION": _INVALID,
    "UNKNOWN_FIELD": _INVALID,
    "CONTEXT_LENGTH_EXCEEDED": _INVALID,
    "MODEL_NOT_FOUND": _MISSING,
    "REQUEST_NOT_FOUND": _MISSING,
    "REQUEST_EXISTS": _CONFLICT,
    "SESSION_NOT_FOUND": _MISSING,
    "SESSION_BUSY": _CONFLICT,
    "QUEUE_FULL": _EXHAUSTED,
    "UNAVAILABLE": _DOWN,
    # kvstore
    "INVALID_REQUEST": _INVALID,
    "INVALID_COMMIT": _INVALID,
    "PROMPT_EXCEEDS_POOL": _INVALID,
    "SEQUENCE_NOT_FOUND": _MISSING,
    "SEQUENCE_EXISTS": _CONFLICT,
    "FOREIGN_SEQUENCE": _FORBIDDEN,
    "SEQUENCE_SUSPENDED": _STALE,
    "SEQUENCE_NOT_SUSPENDED": _STALE,
    "PIN_NOT_FOUND": _MISSING,
    "PIN_EXISTS": _CONFLICT,
    "PIN_BUDGET_EXCEEDED": _EXHAUSTED,
    "QUOTA_EXCEEDED": _EXHAUSTED,
    "OUT_OF_BLOCKS": _EXHAUSTED,
    "NO_ROOM_FOR_POOL": _EXHAUSTED,
    "TOO_MANY_WATCHERS": _EXHAUSTED,
    "EVENTS_TOO_OLD": _TOO_OLD,
    "LEASE_LAPSED": _STALE,
    "LAYOUT_MISMATCH": _STALE,
    "POOL_NOT_ATTACHED": _STALE,
    "CUDA_UNAVAILABLE": _DOWN,
    # compute
    "INVALID_STEP": _INVALID,
    "GRAMMAR_FAILED": _INVALID,
    "NO_TOKEN_ALLOWED": _INVALID,
    "DRIVER_BUSY": _STALE,
    "POOL_UNAVAILABLE": _DOWN,
    "LOADING": _DOWN,
}

INTERNAL_TEXT = "internal error; the server's log has the details"


def status_of(error: BaseException) -> Status:
    """The status of a domain error, or INTERNAL for anything else."""
    reason = getattr(error, "reason", "")
    row = TABLE.get(reason)
    if row is None:
        return Status(_Code.INTERNAL, 500, "server_error", "INTERNAL", INTERNAL_TEXT)
    code, http, kind = row
    retry_after = getattr(error, "retry_after", 1.0 if code is _Code.UNAVAILABLE else None)
    metadata = dict(getattr(error, "metadata", {}))
    return Status(code, http, kind, reason, str(error), metadata, retry_after)


def to_rpc_status(status: Status) -> Any:
    """A grpc status with ErrorInfo and, where a retry makes sense, RetryInfo."""
    details = [
        error_details_pb2.ErrorInfo(reason=status.reason, domain=DOMAIN, metadata=status.metadata)
    ]
    packed = [_pack(detail) for detail in details]
    if status.retry_after is not None:
        delay = duration_pb2.Duration(
            seconds=int(status.retry_after), nanos=int(status.retry_after % 1 * 1e9)
        )
        packed.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    code = code_pb2.Code.Value(status.code.name)
    message = status_pb2.Status(code=code, message=status.message, details=packed)
    return rpc_status.to_status(message)


def _pack(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def error_details(error: grpc.RpcError) -> Status:
    """Read a received error back into the status its sender made of it.

    A failure below the application (a lost connection) has reason "" and the
    library's own code and text.
    """
    code: grpc.StatusCode = error.code()
    message: str = error.details() or ""
    reason, metadata, retry_after = "", {}, None
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # details that contradict the code: a peer that is not ours
        status = None
    for packed in status.details if status is not None else ():
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if packed.Unpack(info):
            reason, metadata = info.reason, dict(info.metadata)
        elif packed.Unpack(retry):
            retry_after = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    row = TABLE.get(reason, (code, 500, "server_error"))
    return Status(code, row[1], row[2], reason, message, metadata, retry_after)


class UndecodableMessage(Exception):
    """The bytes of a request are no message of its type."""

    reason = "INVALID_REQUEST"

    def __init__(self) -> None:
        super().__init__("the request cannot be decoded")
        self.metadata = {"field": "request"}


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what a servicer raises into a status; servicers just raise."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        codec = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if not handler.request_streaming:
            codec["request_deserializer"] = _tolerant(handler.request_deserializer)
        if handler.response_streaming:
            if handler.request_streaming:
                return grpc.stream_stream_rpc_method_handler(
                    _guard_stream(handler.stream_stream, method), **codec
                )
            return grpc.unary_stream_rpc_method_handler(
                _guard_stream(handler.unary_stream, method), **codec
            )
        return grpc.unary_unary_rpc_method_handler(
            _guard_unary(handler.unary_unary, method), **codec
        )


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """The library makes UNKNOWN and a traceback of what this raises, so it returns it."""

    def tolerant(data: bytes) -> Any:
        try:
            return deserialize(data)
        except Exception:  # protobuf's own, whichever implementation it is
            return UndecodableMessage()

    return tolerant


def _raise_undecodable(request: Any) -> None:
    if isinstance(request, UndecodableMessage):
        raise request


def _guard_unary(behaviour: Any, method: str) -> Any:
    async def guarded(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            _raise_undecodable(request)
            return await behaviour(request, context)
        except Exception as error:
            await _abort(error, context, method)

    return guarded


def _guard_stream(behaviour: Any, method: str) -> Any:
    async def guarded(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            _raise_undecodable(request)
            async for response in behaviour(request, context):
                yield response
        except Exception as error:
            await _abort(error, context, method)

    return guarded


async def _abort(error: Exception, context: grpc.aio.ServicerContext, method: str) -> None:
    if isinstance(error, grpc.aio.AbortError):  # the servicer has aborted by itself
        raise error
    status = status_of(error)
    if status.code is _Code.INTERNAL:
        _log.exception("unexpected error", method=method, exc_info=error)
    await context.abort_with_status(to_rpc_status(status))
