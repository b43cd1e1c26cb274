"""Around every HTTP request: its id, its count, its log line, and its last resort."""

from __future__ import annotations

import re
import time
import uuid

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.metrics import Metrics
from services.gateway.rest import errors

_WELL_FORMED = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_CLIENT_LEFT = 499

_log = structlog.get_logger()


class Observer:
    """Outermost layer. Whatever a route raises becomes an answer here."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get("x-request-id"))
        scope.setdefault("state", {})["request_id"] = request_id
        began, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except errors.ClientDisconnected:
                status = _CLIENT_LEFT
            except Exception as error:
                answer: Response = errors.response(error)
                if status:  # part of an answer is out; only a closed connection tells the rest
                    raise
                await answer(scope, receive, send_with_id)
            self._report(scope, status, time.monotonic() - began)
            structlog.contextvars.unbind_contextvars("generation_id")

    def _report(self, scope: Scope, status: int, seconds: float) -> None:
        # The pattern and not the path, which clients choose at will.
        route = getattr(scope.get("route"), "path", "unknown")
        self._metrics.http_requests.labels(scope["method"], route, str(status)).inc()
        facts = {"method": scope["method"], "route": route, "status": status}
        if error := scope["state"].get("error"):  # amid a stream, after its status
            facts["error"] = error
        log = _log.info if route.startswith("/v1/") else _log.debug
        log("request", **facts, seconds=round(seconds, 4))


def _request_id(given: str | None) -> str:
    if given is not None and _WELL_FORMED.fullmatch(given):
        return given
    return uuid.uuid4().hex
