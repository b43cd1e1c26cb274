"""Bodies of generation requests, checked strictly: no guessing, no conversion.

Field by field as in OpenAI's reference, plus top_k, min_p and ignore_eos.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError, from_json

from gateway.errors import InvalidField
from services.gateway.rest import options
from services.gateway.rest.options import Inert

MAX_PROMPTS = 256
MAX_STOPS = 16

_STRING = {"type": "string"}
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}}

# OpenAI's default of this old endpoint; clients rely on it.
_COMPLETION_TOKENS = 16


def _listed(value: object) -> object:
    if isinstance(value, str):
        return [value]
    if value is None or isinstance(value, list):
        return value
    raise PydanticCustomError("stop", "Must be a string or a list of strings")


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool | None = Field(None, description="end with a chunk that has the usage")


class GenerationOptions(_Strict):
    """What both endpoints take."""

    inert: ClassVar[Mapping[str, Inert]]

    model: str = Field(max_length=256, description="an id from GET /v1/models")
    max_tokens: int | None = Field(None, ge=1, description="most tokens to generate")
    temperature: float | None = Field(None, ge=0, le=2, description="default 1; 0: greedy")
    top_p: float | None = Field(None, gt=0, le=1, description="default 1: no limit")
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="default 0 or -1: no limit")
    min_p: float | None = Field(None, ge=0, le=1, description="default 0: no limit")
    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="default: a random one")
    stop: Annotated[
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS)] | None,
        BeforeValidator(_listed),
        WithJsonSchema({"anyOf": [_STRING, {"type": "array", "items": _STRING}]}),
    ] = None
    stream: bool | None = Field(None, description="answer with server-sent events")
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = Field(None, description="go on past the end-of-sequence token")
    user: str | None = None
    metadata: dict[str, str] | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(GenerationOptions):
    """Body of POST /v1/completions."""

    inert = options.COMPLETION

    prompt: Annotated[
        Any,
        WithJsonSchema(
            {
                "anyOf": [
                    _STRING,
                    _TOKENS,
                    {"type": "array", "items": _STRING},
                    {"type": "array", "items": _TOKENS},
                ]
            }
        ),
    ]

    @property
    def token_limit(self) -> int | None:
        return _COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def prompts(self) -> list[str | list[int]]:
        """Texts or token ids, one per choice. Raises InvalidField."""
        if self.prompt in ("", []):
            raise InvalidField("prompt", "prompt: it is empty")
        if isinstance(self.prompt, str) or _is_tokens(self.prompt):
            return [self.prompt]
        if not isinstance(self.prompt, list):
            raise InvalidField("prompt", "prompt: must be a string, token ids, or a list of those")
        if len(self.prompt) > MAX_PROMPTS:
            raise InvalidField("prompt", f"prompt: at most {MAX_PROMPTS} prompts in a request")
        return [_prompt(item, f"prompt[{i}]") for i, item in enumerate(self.prompt)]


def _is_tokens(value: object) -> bool:
    # `type` and not `isinstance`: true is an int in Python.
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _prompt(item: object, path: str) -> str | list[int]:
    if item in ("", []):
        raise InvalidField(path, f"{path}: it is empty")
    if isinstance(item, str):
        return item
    if isinstance(item, list) and _is_tokens(item):
        return item
    raise InvalidField(path, f"{path}: must be a string or token ids, like the others")


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Any,
        WithJsonSchema(
            {
                "anyOf": [
                    _STRING,
                    {"type": "array", "items": {"$ref": "#/components/schemas/TextPart"}},
                ]
            }
        ),
    ]


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class ChatRequest(GenerationOptions):
    """Body of POST /v1/chat/completions."""

    inert = options.CHAT

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, description="as max_tokens")

    @property
    def token_limit(self) -> int | None:
        if self.max_completion_tokens is None:
            return self.max_tokens
        return self.max_completion_tokens

    def conversation(self) -> list[dict[str, str]]:
        """Messages with a role and a text each. Raises InvalidField."""
        return [
            {"role": _role(message.role), "content": _content(message, f"messages[{i}].content")}
            for i, message in enumerate(self.messages)
        ]


def _role(role: str) -> str:
    # Its new name in OpenAI's API; chat templates know only the old one.
    return "system" if role == "developer" else role


def _content(message: Message, path: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if not isinstance(message.content, list) or not message.content:
        raise InvalidField(path, f"{path}: must be a string or a list of text parts")
    return "".join(_part(part, f"{path}[{i}]") for i, part in enumerate(message.content))


def _part(part: object, path: str) -> str:
    if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] != "text":
        raise options.unsupported(f"{path}.type", "only text parts are supported")
    return _checked(TextPart, part, path + ".").text


B = TypeVar("B", bound=GenerationOptions)
M = TypeVar("M", bound=BaseModel)


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
    request = _checked(kind, _supported(fields, kind.inert))
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
    if request.stream_options is not None and not request.stream:
        raise InvalidField("stream_options", "stream_options: only allowed with stream: true")
    if request.max_tokens not in (None, request.token_limit):
        raise InvalidField("max_tokens", "max_tokens: contradicts max_completion_tokens")


# Where the library's own words speak of Python.
_TEXTS = {
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "too_long": "may have {max_length} entries at most",
    "too_short": "must have {min_length} entries at least",
    "string_too_short": "must not be empty",
}


def _checked(kind: type[M], value: object, path: str = "") -> M:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    field = path + "".join(_step(part) for part in first["loc"]).removeprefix(".")
    field = field.removesuffix(".")
    if first["type"] == "extra_forbidden":
        raise InvalidField(field, f"{field}: unknown field", reason="UNKNOWN_FIELD")
    text = _TEXTS.get(first["type"], first["msg"]).format(**first.get("ctx", {}))
    raise InvalidField(field, f"{field}: {text[0].lower()}{text[1:]}")


def _step(part: int | str) -> str:
    return f"[{part}]" if isinstance(part, int) else f".{part}"
