"""GenerationService's messages to and from the gateway's types."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from quire.common.v1 import common_pb2
from quire.gateway.v1 import gateway_pb2 as pb

from gateway import grammar
from gateway.errors import InvalidField
from gateway.grammar import Structure, StructureKind
from gateway.ports import ModelInfo, SamplingOptions
from gateway.sessions import DEFAULT_TTL, SessionOptions
from gateway.types import (
    BeamOptions,
    Delta,
    EarlyStopping,
    Finished,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    PromptScored,
    ScoredToken,
    Started,
)
from gateway.validation import MAX_BIASES, MAX_MESSAGES, validate_length
from services.common.durations import seconds_of
from services.gateway.frontend import new_seed, renamed

TokenBytes = Callable[[int], bytes]

_ROLES = ("system", "user", "assistant")
_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

# gRPC's clients refuse messages over 4 MiB, as they come.
_MAX_SCORES_BYTES = 2**20
_MAX_TEXT = 2**18  # characters

_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}

_EARLY_STOPPING = {
    pb.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.NO,
    pb.EARLY_STOPPING_NO: EarlyStopping.NO,
    pb.EARLY_STOPPING_YES: EarlyStopping.YES,
    pb.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}

# The gateway's names of fields, and the contract's where they are others.
_NAMES = {
    "max_tokens": "max_token_count",
    "n": "continuation_count",
    "best_of": "best_of_count",
    "num_beams": "beams.beam_count",
    "length_penalty": "beams.length_penalty",
    "echo_stop": "include_stop",
    "salt": "cache_salt",
    "min_tokens": "sampling.min_token_count",
    "num_top_logprobs": "sampling.top_logprob_count",
}
_SAMPLING_FIELDS = frozenset(common_pb2.SamplingOptions.DESCRIPTOR.fields_by_name)


# --- requests -----------------------------------------------------------------


def conversation(chat: pb.ChatMessages) -> list[dict[str, str]]:
    """Raises InvalidField: no messages or too many, or a role that is none."""
    validate_length("chat.messages", chat.messages, MAX_MESSAGES)
    if not chat.messages:
        raise InvalidField("chat.messages", "chat.messages: it is empty")
    for index, message in enumerate(chat.messages):
        if message.role not in _ROLES:
            path = f"chat.messages[{index}].role"
            raise InvalidField(path, f"{path}: must be one of {', '.join(_ROLES)}")
    return [{"role": message.role, "content": message.content} for message in chat.messages]


def refuse_long_lists(request: pb.GenerateRequest) -> None:
    """Raises InvalidField for what would take seconds only to be looked through."""
    validate_length("logit_bias", request.sampling.logit_bias, MAX_BIASES)
    validate_length("messages", request.chat.messages, MAX_MESSAGES)


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
    request: pb.GenerateRequest, request_id: str, prompt_ids: list[int], grammar_text: str
) -> GenerationRequest:
    """Raises InvalidField for what only the wire can get wrong."""
    for field in ("max_token_count", "continuation_count", "best_of_count"):
        if getattr(request, field) < 0:
            raise InvalidField(field, f"{field}: must not be negative")
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=prompt_ids,
        max_tokens=request.max_token_count or None,
        sampling=_sampling(request.sampling, request.use_seed, grammar_text),
        n=request.continuation_count or 1,
        best_of=request.best_of_count or None,
        beams=_beams(request.beams) if request.HasField("beams") else None,
        stop=tuple(request.stop),
        echo_stop=request.include_stop,
        ignore_eos=request.ignore_eos,
        priority=request.priority,
        salt=request.cache_salt,
    )


def _sampling(
    given: common_pb2.SamplingOptions, use_seed: bool, grammar_text: str
) -> SamplingOptions:
    if given.sequence_index != 0:
        text = "sampling.sequence_index: must be 0, the gateway counts sequences"
        raise InvalidField("sampling.sequence_index", text)
    return SamplingOptions(
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p or 1.0,
        min_p=given.min_p,
        typical_p=given.typical_p or 1.0,
        repetition_penalty=given.repetition_penalty or 1.0,
        frequency_penalty=given.frequency_penalty,
        presence_penalty=given.presence_penalty,
        logit_bias=tuple((one.token_id, one.bias) for one in given.logit_bias),
        min_tokens=given.min_token_count,
        stop_token_ids=tuple(given.stop_token_ids),
        grammar=grammar_text,
        seed=given.seed if use_seed else new_seed(),
        return_logprob=given.return_logprob,
        return_prompt_logprobs=given.return_prompt_logprobs,
        num_top_logprobs=given.top_logprob_count,
    )


def _beams(given: pb.BeamOptions) -> BeamOptions:
    if given.early_stopping not in _EARLY_STOPPING:
        field = "beams.early_stopping"
        raise InvalidField(field, f"{field}: there is no value {given.early_stopping}")
    return BeamOptions(
        num_beams=given.beam_count,
        length_penalty=given.length_penalty if given.HasField("length_penalty") else 1.0,
        early_stopping=_EARLY_STOPPING[given.early_stopping],
    )


def structure(request: pb.GenerateRequest) -> Structure | None:
    """What the answer must be, if anything. Raises InvalidField."""
    if not request.HasField("structure"):
        return None
    given, form = request.structure, request.structure.WhichOneof("form")
    field = f"structure.{form}"
    if form == "choice":
        return grammar.choice(given.choice.texts, "structure.choice.texts")
    if form == "json_object":
        if not given.json_object:
            raise InvalidField(field, f"{field}: must be true or left out")
        return grammar.json_object(field)
    if form is None:
        raise InvalidField("structure", "structure: one of its forms is needed")
    return Structure(StructureKind(form), getattr(given, form), field)


def session(request: pb.GenerateRequest) -> SessionOptions | None:
    """How the conversation is kept, if at all. Raises InvalidField."""
    if not request.HasField("session"):
        return None
    given = request.session
    if given.source_id and request.WhichOneof("prompt") == "chat":
        text = "session.source_id: the prompt must be text or token ids, not a whole conversation"
        raise InvalidField("session.source_id", text)
    if not 0 <= given.ttl.nanos < 10**9:
        text = f"session.ttl: {given.ttl.nanos} is no number of nanoseconds below a second"
        raise InvalidField("session.ttl", text)
    ttl = seconds_of(given.ttl) if given.HasField("ttl") else DEFAULT_TTL
    return SessionOptions(given.id, ttl, given.source_id, given.source_token_count)


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
        raise renamed(error, _wire_name(error.field, request)) from None


def _wire_name(field: str, request: pb.GenerateRequest | pb.TokenizeRequest) -> str:
    name, bracket, rest = field.partition("[")
    if field == "prompt":
        return _prompt_field(request) or field
    if field == "grammar" and isinstance(request, pb.GenerateRequest):
        return f"structure.{request.structure.WhichOneof('form')}"
    if field.startswith("messages"):
        return f"chat.{field}"
    name = f"sampling.{name}" if name in _SAMPLING_FIELDS else _NAMES.get(name, name)
    return name + bracket + rest


def request_id(given: str) -> str:
    """The client's own id, or a new one. Raises InvalidField."""
    if not given:
        return f"gen-{uuid.uuid4().hex}"
    if not _REQUEST_ID.fullmatch(given):
        raise InvalidField("request_id", "request_id: must be 1 to 64 characters of [A-Za-z0-9_-]")
    return given


# --- responses ----------------------------------------------------------------


def generate_responses(
    event: GenerationEvent, model_id: str, token_bytes: TokenBytes
) -> Iterator[pb.GenerateResponse]:
    """One message, or several small ones for what is long."""
    if isinstance(event, Started):
        started = pb.GenerationStarted(
            request_id=event.request_id,
            model=model_id,
            prompt_token_count=event.num_prompt_tokens,
            cached_token_count=event.num_cached_tokens,
        )
        yield pb.GenerateResponse(started=started)
    elif isinstance(event, PromptScored):
        for tokens in _in_parts(event.tokens, token_bytes):
            yield pb.GenerateResponse(prompt_scored=pb.PromptScored(tokens=tokens))
    elif isinstance(event, Delta):
        yield from _deltas(event, token_bytes)
    else:
        yield pb.GenerateResponse(finished=_finished(event))


def _deltas(event: Delta, token_bytes: TokenBytes) -> Iterator[pb.GenerateResponse]:
    """Parts of the text first; its tokens come with the last part, or after it."""
    text, index = event.text, event.index
    while len(text) > _MAX_TEXT:
        part, text = text[:_MAX_TEXT], text[_MAX_TEXT:]
        yield pb.GenerateResponse(delta=pb.GenerationDelta(text=part, index=index))
    if not event.logprobs:
        delta = pb.GenerationDelta(text=text, token_ids=event.token_ids, index=index)
        yield pb.GenerateResponse(delta=delta)
        return
    for scores in _in_parts(event.logprobs, token_bytes):
        token_ids = [one.token.token_id for one in scores]
        delta = pb.GenerationDelta(text=text, token_ids=token_ids, logprobs=scores, index=index)
        yield pb.GenerateResponse(delta=delta)
        text = ""


def _in_parts(
    tokens: Sequence[ScoredToken], token_bytes: TokenBytes
) -> Iterator[list[pb.ScoredToken]]:
    """At least one, of a size that fits into a message."""
    part: list[pb.ScoredToken] = []
    size = 0
    for token in tokens:
        scored = _scored(token, token_bytes)
        size += scored.ByteSize()
        if part and size > _MAX_SCORES_BYTES:
            yield part
            part, size = [], scored.ByteSize()
        part.append(scored)
    yield part


def _scored(token: ScoredToken, token_bytes: TokenBytes) -> pb.ScoredToken:
    def one(token_id: int, logprob: float) -> pb.TokenLogprob:
        return pb.TokenLogprob(
            token_id=token_id, logprob=logprob, token_bytes=token_bytes(token_id)
        )

    top = [one(likely.token_id, likely.logprob) for likely in token.top]
    return pb.ScoredToken(token=one(token.token_id, token.logprob), top=top)


def _finished(event: Finished) -> pb.GenerationFinished:
    finished = pb.GenerationFinished(
        finish_reason=_FINISH_REASONS[event.reason],
        completion_token_count=event.num_completion_tokens,
        index=event.index,
        score=event.score,
    )
    if isinstance(event.stop, str):
        finished.stop_text = event.stop
    elif event.stop is not None:
        finished.stop_token_id = event.stop
    return finished


def list_models_response(models: Sequence[ModelInfo]) -> pb.ListModelsResponse:
    return pb.ListModelsResponse(
        models=[
            pb.Model(id=model.model_id, max_sequence_length=model.max_sequence_length)
            for model in models
        ]
    )
