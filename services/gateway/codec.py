"""GenerationService's messages to and from the gateway's types."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from quire.common.v1 import common_pb2
from quire.gateway.v1 import gateway_pb2 as pb

from gateway.errors import InvalidField
from gateway.ports import ModelInfo, SamplingOptions
from gateway.types import Delta, FinishReason, GenerationEvent, GenerationRequest, Started
from services.gateway.frontend import new_seed, renamed

_ROLES = ("system", "user", "assistant")
_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

_SAMPLING_FIELDS = frozenset(common_pb2.SamplingOptions.DESCRIPTOR.fields_by_name)

_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}


def conversation(chat: pb.ChatMessages) -> list[dict[str, str]]:
    """Raises InvalidField: no messages, or a role that is none."""
    if not chat.messages:
        raise InvalidField("chat.messages", "chat.messages: it is empty")
    for index, message in enumerate(chat.messages):
        if message.role not in _ROLES:
            path = f"chat.messages[{index}].role"
            raise InvalidField(path, f"{path}: must be one of {', '.join(_ROLES)}")
    return [{"role": message.role, "content": message.content} for message in chat.messages]


def refuse_unknown_fields(message: Message) -> None:
    """Raises InvalidField if it has a field of a later version, which might change the answer."""
    fields: Any = UnknownFieldSet(message)
    for unknown in fields:
        name = f"{message.DESCRIPTOR.name} field {unknown.field_number}"
        raise InvalidField(name, f"{name}: unknown field", reason="UNKNOWN_FIELD")
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if isinstance(value, Sequence) else [value]:
                refuse_unknown_fields(part)


def generation_request(
    request: pb.GenerateRequest, request_id: str, prompt_ids: list[int]
) -> GenerationRequest:
    """Raises InvalidField for what only the wire can get wrong."""
    if request.max_token_count < 0:
        raise InvalidField("max_token_count", "max_token_count: must not be negative")
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=prompt_ids,
        max_tokens=request.max_token_count or None,
        sampling=_sampling(request.sampling, request.use_seed),
        stop=tuple(request.stop),
        ignore_eos=request.ignore_eos,
    )


def _prompt_field(request: pb.GenerateRequest | pb.TokenizeRequest) -> str | None:
    if isinstance(request, pb.GenerateRequest):
        return request.WhichOneof("prompt")
    return request.WhichOneof("input")


@contextmanager
def wire_names(request: pb.GenerateRequest | pb.TokenizeRequest) -> Iterator[None]:
    """Errors inside name the field as the message does."""
    try:
        yield
    except InvalidField as error:
        field = error.field
        if field == "prompt":
            field = _prompt_field(request) or field
        elif field == "max_tokens":
            field = "max_token_count"
        elif field in _SAMPLING_FIELDS:
            field = f"sampling.{field}"
        elif field.startswith("messages"):
            field = f"chat.{field}"
        raise renamed(error, field) from None


def request_id(given: str) -> str:
    """The client's own id, or a new one. Raises InvalidField."""
    if not given:
        return f"gen-{uuid.uuid4().hex}"
    if not _REQUEST_ID.fullmatch(given):
        raise InvalidField("request_id", "request_id: must be 1 to 64 characters of [A-Za-z0-9_-]")
    return given


def _sampling(given: common_pb2.SamplingOptions, use_seed: bool) -> SamplingOptions:
    if given.sequence_index != 0:
        text = "sampling.sequence_index: must be 0, a request has one sequence"
        raise InvalidField("sampling.sequence_index", text)
    return SamplingOptions(
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p or 1.0,
        min_p=given.min_p,
        seed=given.seed if use_seed else new_seed(),
        return_logprob=given.return_logprob,
    )


def generate_response(event: GenerationEvent, model_id: str) -> pb.GenerateResponse:
    if isinstance(event, Started):
        started = pb.GenerationStarted(
            request_id=event.request_id,
            model=model_id,
            prompt_token_count=event.num_prompt_tokens,
            cached_token_count=event.num_cached_tokens,
        )
        return pb.GenerateResponse(started=started)
    if isinstance(event, Delta):
        delta = pb.GenerationDelta(
            text=event.text, token_ids=event.token_ids, logprobs=event.logprobs
        )
        return pb.GenerateResponse(delta=delta)
    finished = pb.GenerationFinished(
        finish_reason=_FINISH_REASONS[event.reason],
        completion_token_count=event.num_completion_tokens,
    )
    return pb.GenerateResponse(finished=finished)


def list_models_response(models: Sequence[ModelInfo]) -> pb.ListModelsResponse:
    return pb.ListModelsResponse(
        models=[
            pb.Model(id=model.model_id, max_sequence_length=model.max_sequence_length)
            for model in models
        ]
    )
