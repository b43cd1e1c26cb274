"""Errors as OpenAI's clients expect them: {"error": {message, type, param, code}}."""

from __future__ import annotations

import math
from typing import Any

import structlog
from starlette.responses import JSONResponse

from services.common.errors import status_of

# A client may have sent a field name of megabytes; nobody wants it back.
_LONGEST_TEXT = 500

_log = structlog.get_logger()


class HttpError(Exception):
    """A refusal that only HTTP knows. `headers` go with the response."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = headers or {}


class BodyTooLarge(HttpError):
    def __init__(self, limit: int) -> None:
        super().__init__(413, "body_too_large", f"the body is over the limit of {limit} bytes")


class RequestCancelled(HttpError):
    """Somebody cancelled the generation by its id while its client was waiting."""

    def __init__(self) -> None:
        super().__init__(409, "request_cancelled", "the request was cancelled")


class ClientDisconnected(Exception):
    """The client closed the connection before it had its answer."""


def _body(message: str, kind: str, param: str | None, code: str) -> dict[str, Any]:
    return {
        "error": {
            "message": _shortened(message),
            "type": kind,
            "param": _shortened(param) if param is not None else None,
            "code": code,
        }
    }


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "…"


def described(error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    """HTTP status, body and headers of an error. An unexpected one is logged here."""
    if isinstance(error, HttpError):
        body = _body(str(error), "invalid_request_error", error.param, error.code)
        return error.status, body, error.headers
    status = status_of(error)
    if status.reason == "INTERNAL":
        _log.error("unexpected error", exc_info=error)
    headers = {}
    if status.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(status.retry_after)))
    body = _body(status.message, status.type, status.metadata.get("field"), status.reason.lower())
    return status.http, body, headers


def response(error: Exception) -> JSONResponse:
    status, body, headers = described(error)
    return JSONResponse(body, status, headers)
