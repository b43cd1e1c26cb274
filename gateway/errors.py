"""Errors of the gateway.

GatewayError
├── InvalidField        a field of a request is wrong; `field` names it
├── ModelNotFound
├── RequestExists       the request id is running
├── RequestNotFound
├── SessionBusy         another request goes on with the session
├── SessionNotFound     it has lapsed, or there never was one
├── QueueFull           try again after `retry_after` seconds
├── WorkerUnavailable   loading, draining, or a worker is gone; try again
├── ModelFilesInvalid   tokenizer or chat template missing or unusable
├── PinRefused          a session cannot be kept
├── GenerationFailed    one sequence cannot go on
└── StepRefused         compute would not run a step: a bug on our side
"""

from __future__ import annotations


class GatewayError(Exception):
    """Base of all errors of this package. `reason` is stable; the text is for people."""

    reason = "GATEWAY_ERROR"

    def __init__(self, message: str, **metadata: object) -> None:
        super().__init__(message)
        self.metadata = {key: str(value) for key, value in metadata.items()}


class InvalidField(GatewayError):
    reason = "INVALID_FIELD"

    def __init__(self, field: str, message: str, *, reason: str = "INVALID_FIELD") -> None:
        super().__init__(message, field=field)
        self.reason = reason
        self.field = field


class ModelNotFound(GatewayError):
    reason = "MODEL_NOT_FOUND"

    def __init__(self, model: str) -> None:
        super().__init__(f"the model {model!r} is not served here", field="model")


class RequestExists(GatewayError):
    reason = "REQUEST_EXISTS"

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request {request_id!r} is running", field="request_id")


class RequestNotFound(GatewayError):
    reason = "REQUEST_NOT_FOUND"

    def __init__(self, request_id: str) -> None:
        super().__init__(f"no request {request_id!r} is running", field="request_id")


class SessionBusy(GatewayError):
    reason = "SESSION_BUSY"

    def __init__(self, session_id: str) -> None:
        text = f"another request goes on with the session {session_id!r}"
        super().__init__(text, field="session.id")


class SessionNotFound(GatewayError):
    reason = "SESSION_NOT_FOUND"

    def __init__(self, session_id: str) -> None:
        text = f"there is no session {session_id!r}, or not any more: send its whole text"
        super().__init__(text, field="session.source_id")


class QueueFull(GatewayError):
    reason = "QUEUE_FULL"

    def __init__(self, *, limit: int, retry_after: float = 1.0) -> None:
        super().__init__(f"{limit} requests are waiting already", limit=limit)
        self.retry_after = retry_after


class WorkerUnavailable(GatewayError):
    reason = "UNAVAILABLE"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class PinRefused(GatewayError):
    reason = "PIN_REFUSED"


class GenerationFailed(GatewayError):
    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class ModelFilesInvalid(GatewayError):
    reason = "MODEL_FILES_INVALID"


class StepRefused(GatewayError):
    reason = "STEP_REFUSED"
