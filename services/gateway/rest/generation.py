"""POST /v1/completions and /v1/chat/completions, from the body to the last byte."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress

import structlog
from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.errors import InvalidField
from gateway.ports import SamplingOptions
from gateway.types import Delta, GenerationEvent, GenerationRequest, Started
from services.gateway.frontend import Frontend, new_seed, renamed
from services.gateway.merge import merged
from services.gateway.rest import errors
from services.gateway.rest.answers import (
    Answer,
    ChatFormat,
    CompletionFormat,
    Format,
    Head,
    Json,
    usage,
)
from services.gateway.rest.connection import read_json_body, unless_disconnected
from services.gateway.rest.schema import (
    ChatRequest,
    CompletionRequest,
    GenerationOptions,
    parse,
)

Indexed = tuple[int, GenerationEvent]  # with the index of the prompt
Events = AsyncGenerator[Indexed]

_COMPLETION, _CHAT = CompletionFormat(), ChatFormat()


class GenerationRoutes:
    """The two endpoints over one frontend. A body has at most `max_body_bytes`."""

    def __init__(self, frontend: Frontend, max_body_bytes: int) -> None:
        self._frontend = frontend
        self._max_body_bytes = max_body_bytes

    async def complete(self, request: Request) -> Response:
        body = await read_json_body(request, self._max_body_bytes)
        asked = parse(CompletionRequest, body)
        model = self._frontend.model(asked.model)
        prompts = await self._tokenized(asked.prompts())
        head = Head(f"cmpl-{uuid.uuid4().hex}", int(time.time()), model)
        return await self._respond(request, asked, prompts, head, _COMPLETION)

    async def chat(self, request: Request) -> Response:
        body = await read_json_body(request, self._max_body_bytes)
        asked = parse(ChatRequest, body)
        model = self._frontend.model(asked.model)
        conversation = asked.conversation()
        self._frontend.check_conversation(conversation)
        prompt = await self._frontend.tokenize_chat(conversation)
        head = Head(f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), model)
        return await self._respond(request, asked, [prompt], head, _CHAT)

    async def _tokenized(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        self._frontend.check_texts(texts)
        tokenized = iter(await self._frontend.tokenize(texts))
        return [next(tokenized) if isinstance(prompt, str) else prompt for prompt in prompts]

    async def _respond(
        self,
        request: Request,
        asked: GenerationOptions,
        prompts: Sequence[list[int]],
        head: Head,
        form: Format,
    ) -> Response:
        structlog.contextvars.bind_contextvars(generation_id=head.id)
        requests = _requests(asked, prompts, head.id, request.state.request_id)
        events = merged([self._frontend.generate(one) for one in requests])
        answers = [Answer() for _ in prompts]
        if not asked.stream:
            await unless_disconnected(request.receive, _fill(answers, events, asked))
            choices = [form.choice(i, answer) for i, answer in enumerate(answers)]
            return JSONResponse(head.object(form.kind, choices, usage=usage(answers)))
        # An error before the first event still gets an HTTP status of its own.
        first = await unless_disconnected(request.receive, _first(events, asked))
        whole = _with_first(first, events)
        return EventStream(_lines(whole, answers, head, form, asked.include_usage, request.state))


def _requests(
    asked: GenerationOptions, prompts: Sequence[list[int]], answer_id: str, log_id: str
) -> list[GenerationRequest]:
    # One prompt's answer has the id that its client sees, so that it can be cancelled.
    ids = [answer_id] if len(prompts) == 1 else [f"{answer_id}-{i}" for i in range(len(prompts))]
    sampling = SamplingOptions(
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_k=max(0, asked.top_k or 0),
        top_p=1.0 if asked.top_p is None else asked.top_p,
        min_p=asked.min_p or 0.0,
        # Seeds are 64 bits without a sign inside.
        seed=new_seed() if asked.seed is None else asked.seed % 2**64,
    )
    return [
        GenerationRequest(
            request_id=request_id,
            prompt_ids=prompt,
            max_tokens=asked.token_limit,
            sampling=sampling,
            stop=tuple(asked.stop or ()),
            ignore_eos=bool(asked.ignore_eos),
            log_id=log_id,
        )
        for request_id, prompt in zip(ids, prompts, strict=True)
    ]


async def _fill(answers: list[Answer], events: Events, asked: GenerationOptions) -> None:
    """Run all generations to their ends."""
    with _rest_names(asked):
        async with aclosing(events):
            async for index, event in events:
                answers[index].add(event)


async def _first(events: Events, asked: GenerationOptions) -> Indexed:
    with _rest_names(asked):
        return await anext(events)


@contextmanager
def _rest_names(asked: GenerationOptions) -> Iterator[None]:
    """Errors inside name the field as the client wrote it."""
    try:
        yield
    except InvalidField as error:
        field = error.field
        if field == "prompt" and isinstance(asked, ChatRequest):
            field = "messages"
        elif field == "max_tokens" and "max_completion_tokens" in asked.model_fields_set:
            field = "max_completion_tokens"
        raise renamed(error, field) from None


async def _with_first(first: Indexed, events: Events) -> Events:
    async with aclosing(events):
        yield first
        async for item in events:
            yield item


async def _lines(
    events: Events,
    answers: list[Answer],
    head: Head,
    form: Format,
    include_usage: bool,
    state: State,
) -> AsyncGenerator[bytes]:
    """Server-sent events: chunks, the usage if asked for, [DONE]; or an error and no more."""
    rest: Json = {"usage": None} if include_usage else {}
    try:
        async with aclosing(events):
            async for index, event in events:
                answers[index].add(event)
                choice = _chunk_choice(form, index, event)
                if choice is not None:
                    yield _line(head.object(form.chunk_kind, [choice], **rest))
        if include_usage:
            yield _line(head.object(form.chunk_kind, [], usage=usage(answers)))
        yield b"data: [DONE]\n\n"
    except Exception as error:  # too late for a status: the client learns of it in the stream
        content = errors.described(error)[1]
        state.error = content["error"]["code"]  # for the log, whose status is 200
        yield _line(content)


def _chunk_choice(form: Format, index: int, event: GenerationEvent) -> Json | None:
    if isinstance(event, Started):
        return form.opening(index)
    if isinstance(event, Delta):
        return form.piece(index, event.text) if event.text else None
    return form.closing(index, event.reason.value)


def _line(content: Json) -> bytes:
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"


class EventStream(StreamingResponse):
    """Sends lines until they end or the client leaves; either way they are closed."""

    def __init__(self, lines: AsyncGenerator[bytes]) -> None:
        # The second header asks proxies not to collect chunks.
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(lines, headers=headers, media_type="text/event-stream")
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        with suppress(errors.ClientDisconnected):
            await unless_disconnected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._lines):
            await self.stream_response(send)
