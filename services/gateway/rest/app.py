"""The application: routes, their documentation, and the layers around them."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.ports import ModelInfo
from services.gateway.frontend import Frontend
from services.gateway.rest import errors
from services.gateway.rest.generation import GenerationRoutes
from services.gateway.rest.middleware import Observer
from services.gateway.rest.schema import ChatRequest, CompletionRequest, TextPart

_REF = "#/components/schemas/{model}"
_RETRY = {"retry-after": "1"}


def create_app(frontend: Frontend, *, max_body_bytes: int, version: str = "0.1.0") -> FastAPI:
    """OpenAI's REST API over `frontend`, with health and metrics beside it."""
    app = FastAPI(title="Quire", version=version, redirect_slashes=False)
    app.add_middleware(Observer, metrics=frontend.metrics)
    app.add_exception_handler(HTTPException, _http_exception)
    _add_generation(app, GenerationRoutes(frontend, max_body_bytes))
    _add_models(app, frontend)
    _add_operations(app, frontend)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _add_generation(app: FastAPI, routes: GenerationRoutes) -> None:
    for path, endpoint, body in (
        ("/v1/completions", routes.complete, CompletionRequest),
        ("/v1/chat/completions", routes.chat, ChatRequest),
    ):
        app.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            response_model=None,
            openapi_extra={
                "requestBody": {
                    "required": True,
                    "content": {
                        "application/json": {"schema": {"$ref": _REF.format(model=body.__name__)}}
                    },
                }
            },
        )


def _add_models(app: FastAPI, frontend: Frontend) -> None:
    started = int(time.time())

    def described(model: ModelInfo) -> dict[str, Any]:
        return {
            "id": model.model_id,
            "object": "model",
            "created": started,
            "owned_by": "quire",
            "max_model_len": model.max_sequence_length,
        }

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [described(model) for model in frontend.models()]}

    # A path, since names from a hub contain a slash.
    @app.get("/v1/models/{model_id:path}")
    async def retrieve_model(model_id: str) -> dict[str, Any]:
        return described(frontend.model(model_id))


def _add_operations(app: FastAPI, frontend: Frontend) -> None:
    @app.get("/health/live")
    async def live() -> dict[str, str]:
        return {"status": "live"}

    @app.get("/health/ready", response_model=None)
    async def ready() -> Response:
        if frontend.is_ready():
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready"}, 503, _RETRY)

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return Response(await frontend.scrape(), headers={"content-type": CONTENT_TYPE_LATEST})


async def _http_exception(request: Request, raised: Exception) -> Response:
    """Paths and methods that do not exist."""
    if not isinstance(raised, HTTPException):
        raise raised
    method, path = request.method, request.url.path
    if raised.status_code == 404:
        error = errors.HttpError(404, "not_found", f"there is no {path}")
    elif raised.status_code == 405:
        error = errors.HttpError(405, "method_not_allowed", f"{path} does not take {method}")
    else:
        error = errors.HttpError(raised.status_code, "bad_request", str(raised.detail))
    error.headers = dict(raised.headers or {})
    return errors.response(error)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document plus the bodies, which are read by our own stricter parser."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        bodies = [(kind, "validation") for kind in (CompletionRequest, ChatRequest, TextPart)]
        _, schema = models_json_schema(bodies, ref_template=_REF)  # type: ignore[arg-type]
        document.setdefault("components", {}).setdefault("schemas", {}).update(schema["$defs"])
        app.openapi_schema = document
    return app.openapi_schema
