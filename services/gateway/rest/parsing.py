"""From the bytes of a body to a request that makes sense in itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic_core import from_json

from gateway.errors import InvalidField
from services.gateway.rest import options
from services.gateway.rest.checked import checked
from services.gateway.rest.options import Inert
from services.gateway.rest.schema import ChatRequest, CompletionRequest, GenerationOptions

B = TypeVar("B", bound=GenerationOptions)


def parse(kind: type[B], body: bytes) -> B:
    """A request of `kind` from the bytes of its body.

    Raises:
        InvalidField: not JSON, an unknown or unsupported field, or a wrong value.
    """
    try:
        # NaN and Infinity pass here, so that the field that has one is named below.
        fields = from_json(body, allow_inf_nan=True)
    except ValueError as error:
        raise InvalidField("body", f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidField("body", "the body must be a JSON object")
    request = checked(kind, _supported(fields, kind.inert))
    _check_together(request)
    return request


def _supported(fields: dict[str, Any], table: Mapping[str, Inert]) -> dict[str, Any]:
    fields = options.without_inert(fields, table)
    stream_options, messages = fields.get("stream_options"), fields.get("messages")
    if isinstance(stream_options, dict):
        fields["stream_options"] = options.without_inert(
            stream_options, options.STREAM, "stream_options."
        )
    if isinstance(messages, list):
        fields["messages"] = [_message(item, f"messages[{i}]") for i, item in enumerate(messages)]
    return fields


def _message(item: object, path: str) -> object:
    if not isinstance(item, dict):
        return item
    if item.get("role") in ("tool", "function"):
        raise options.unsupported(f"{path}.role", "tools are not supported")
    return options.without_inert(item, options.MESSAGE, path + ".")


def _check_together(request: GenerationOptions) -> None:
    """Raises InvalidField for the option that contradicts another."""
    if request.stream_options is not None and not request.stream:
        raise _refused("stream_options", "only allowed with stream: true")
    if request.max_tokens not in (None, request.token_limit):
        raise _refused("max_tokens", "contradicts max_completion_tokens")
    if request.stream:
        _check_stream(request)
    if not request.has_beams:
        for field, is_asked in (
            ("length_penalty", request.length_penalty not in (None, 1)),
            ("early_stopping", request.early_stopping not in (None, False)),
        ):
            if is_asked:
                raise _refused(field, "needs num_beams")
    if request.is_formatted and request.structured_outputs is not None:
        raise _refused("structured_outputs", "contradicts response_format")
    if isinstance(request, CompletionRequest):
        if request.max_tokens == 0 and not request.echo:
            raise _refused("max_tokens", "must be at least 1, or 0 with echo")
    elif isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise _refused("top_logprobs", "needs logprobs: true")


def _check_stream(request: GenerationOptions) -> None:
    """What is only known at the end, or in one piece, cannot be streamed."""
    for field, is_asked in (
        ("num_beams", request.has_beams),
        ("best_of", request.num_candidates not in (None, request.n or 1)),
        ("prompt_logprobs", request.prompt_logprobs is not None),
    ):
        if is_asked:
            raise _refused(field, "cannot be streamed")


def _refused(field: str, text: str) -> InvalidField:
    return InvalidField(field, f"{field}: {text}")
