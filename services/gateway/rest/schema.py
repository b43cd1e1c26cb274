"""Bodies of generation requests, checked strictly: no guessing, no conversion.

Field by field as in OpenAI's reference, and as in vLLM what that does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from gateway.errors import InvalidField
from gateway.validation import (
    MAX_BEAMS,
    MAX_BIASES,
    MAX_SEQUENCES,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    MAX_TOP_LOGPROBS,
)
from services.gateway.rest import options
from services.gateway.rest.checked import checked
from services.gateway.rest.options import Inert

MAX_PROMPTS = 256
MAX_ANSWERS = 1024  # that a body's prompts ask for together, so that others get their turn

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


def _none_if_false(value: object) -> object:
    return None if value is False else value


def _schema(value: object) -> object:
    if value is None or isinstance(value, dict | str):
        return value
    raise PydanticCustomError("schema", "Must be a JSON schema, as an object or a string")


def _early(value: object) -> object:
    if value is None or isinstance(value, bool) or value == "never":
        return value
    raise PydanticCustomError("early_stopping", 'Must be true, false or "never"')


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool | None = Field(None, description="end with a chunk that has the usage")


class JsonSchemaFormat(_Strict):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema", description="a JSON schema")
    strict: bool | None = Field(None, description="the answer always follows the schema")


class ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = Field(None, description="with type json_schema")


class StructuredOutputs(_Strict):
    """Exactly one of these."""

    json_: Annotated[
        Any,
        BeforeValidator(_schema),
        WithJsonSchema({"anyOf": [{"type": "object"}, _STRING]}),
        Field(alias="json", description="a JSON schema"),
    ] = None
    json_object: bool | None = Field(None, description="true: any JSON object")
    regex: str | None = Field(None, description="matches the whole answer")
    choice: list[str] | None = Field(None, description="texts, one of which is the answer")
    grammar: str | None = Field(None, description="GBNF, or Lark's dialect")


class Session(_Strict):
    id: str = Field(description="1 to 64 of A-Z a-z 0-9 _ -")
    ttl: float | None = Field(None, description="seconds, 1 to 86400; default 600")


class GenerationOptions(_Strict):
    """What both endpoints take."""

    inert: ClassVar[Mapping[str, Inert]]

    model: str = Field(max_length=256, description="an id from GET /v1/models")
    max_tokens: int | None = Field(None, ge=1, description="most tokens to generate")
    min_tokens: int | None = Field(None, ge=0, description="tokens before an end; default 0")
    n: int | None = Field(None, ge=1, le=MAX_SEQUENCES, description="choices; default 1")
    temperature: float | None = Field(None, ge=0, le=2, description="default 1; 0: greedy")
    top_p: float | None = Field(None, gt=0, le=1, description="default 1: no limit")
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="default 0 or -1: no limit")
    min_p: float | None = Field(None, ge=0, le=1, description="default 0: no limit")
    typical_p: float | None = Field(None, gt=0, le=1, description="default 1: no limit")
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="default 0")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="default 0")
    repetition_penalty: float | None = Field(None, gt=0, le=10, description="default 1: none")
    logit_bias: dict[str, float] | None = Field(
        None, max_length=MAX_BIASES, description="by token id, -100 to 100"
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="default: a random one")
    stop: Annotated[
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS)] | None,
        BeforeValidator(_listed),
        WithJsonSchema({"anyOf": [_STRING, {"type": "array", "items": _STRING}]}),
    ] = None
    stop_token_ids: list[int] | None = Field(
        None, max_length=MAX_STOP_TOKENS, description="tokens that end the answer too"
    )
    include_stop_str_in_output: bool | None = Field(
        None, description="the stop string that ended the answer is part of it"
    )
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="score the prompt, with this many others"
    )
    num_beams: int | None = Field(
        None, ge=1, le=MAX_BEAMS, description="search with beams instead of drawing; 1: do not"
    )
    length_penalty: float | None = Field(None, ge=-10, le=10, description="of beams; default 1")
    early_stopping: Annotated[
        Any,
        BeforeValidator(_early),
        WithJsonSchema({"enum": [True, False, "never"]}),
        Field(description="of beams, as in transformers; default false"),
    ] = None
    response_format: ResponseFormat | None = Field(None, description="text, or a kind of JSON")
    structured_outputs: StructuredOutputs | None = Field(None, description="what it must be")
    session: Session | None = Field(None, description="keep the conversation's KV")
    priority: int | None = Field(
        None, ge=-100, le=100, description="the lowest goes first; default 0"
    )
    cache_salt: str | None = Field(None, description="KV is shared only with the same salt")
    stream: bool | None = Field(None, description="answer with server-sent events")
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = Field(None, description="go on past the end-of-sequence token")
    user: str | None = None
    metadata: dict[str, str] | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def num_candidates(self) -> int | None:
        """Continuations to choose from, if it is said how many."""
        return None

    @property
    def has_beams(self) -> bool:
        return (self.num_beams or 1) > 1

    @property
    def is_formatted(self) -> bool:
        return self.response_format is not None and self.response_format.type != "text"

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

    max_tokens: int | None = Field(
        None, ge=0, description="most tokens to generate; default 16; 0 only with echo"
    )
    best_of: int | None = Field(
        None, ge=1, le=MAX_SEQUENCES, description="generate so many, return the n likeliest"
    )
    echo: bool | None = Field(None, description="begin with the prompt")
    logprobs: Annotated[
        Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None,
        BeforeValidator(_none_if_false),
        Field(description="score the tokens, with this many others"),
    ] = None

    @property
    def num_candidates(self) -> int | None:
        return self.best_of

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
        each = max(self.n or 1, self.best_of or 1, self.num_beams or 1)
        if len(self.prompt) * each > MAX_ANSWERS:
            text = f"{len(self.prompt)} prompts with {each} sequences each are too many"
            raise InvalidField("prompt", f"prompt: {text}: at most {MAX_ANSWERS} in a request")
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
    logprobs: bool | None = Field(None, description="score the answer's tokens")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="with this many others each"
    )

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
    return checked(TextPart, part, path + ".").text
