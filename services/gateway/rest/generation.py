"""POST /v1/completions and /v1/chat/completions, from the body to the last byte."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress

import structlog
from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.types import Delta, Finished, FinishReason, GenerationEvent
from services.gateway.frontend import Frontend
from services.gateway.merge import merged
from services.gateway.rest import errors, requests
from services.gateway.rest.answers import (
    Answers,
    ChatFormat,
    CompletionFormat,
    Format,
    Head,
    Json,
    Prompt,
    chunks,
)
from services.gateway.rest.connection import read_json_body, unless_disconnected
from services.gateway.rest.parsing import parse
from services.gateway.rest.requests import rest_names
from services.gateway.rest.schema import ChatRequest, CompletionRequest, GenerationOptions

Indexed = tuple[int, GenerationEvent]  # with the index of the prompt
Events = AsyncGenerator[Indexed]


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
        form = CompletionFormat(asked, self._frontend)
        return await self._respond(request, asked, prompts, head, form)

    async def chat(self, request: Request) -> Response:
        body = await read_json_body(request, self._max_body_bytes)
        asked = parse(ChatRequest, body)
        model = self._frontend.model(asked.model)
        conversation = asked.conversation()
        self._frontend.check_conversation(conversation)
        prompt = Prompt(await self._frontend.tokenize_chat(conversation))
        head = Head(f"chatcmpl-{uuid.uuid4().hex}", int(time.time()), model)
        form = ChatFormat(asked, self._frontend)
        return await self._respond(request, asked, [prompt], head, form)

    async def _tokenized(self, prompts: Sequence[str | list[int]]) -> list[Prompt]:
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        self._frontend.check_texts(texts)
        tokenized = iter(await self._frontend.tokenize(texts))
        return [
            Prompt(next(tokenized), prompt) if isinstance(prompt, str) else Prompt(prompt)
            for prompt in prompts
        ]

    async def _respond(
        self,
        request: Request,
        asked: GenerationOptions,
        prompts: Sequence[Prompt],
        head: Head,
        form: Format,
    ) -> Response:
        structlog.contextvars.bind_contextvars(generation_id=head.id)
        log_id = request.state.request_id
        streams = await unless_disconnected(
            request.receive, self._streams(asked, prompts, head.id, log_id)
        )
        events, answers = merged(streams), Answers(prompts, asked.n or 1)
        if not asked.stream:
            await unless_disconnected(request.receive, _fill(answers, events, asked))
            choices = [form.choice(i, answer) for i, answer in enumerate(answers.choices)]
            rest = {"usage": answers.usage(), **form.rest(answers)}
            return JSONResponse(head.object(form.kind, choices, **rest))
        # An error before the first event still gets an HTTP status of its own.
        first = await unless_disconnected(request.receive, _first(events, asked))
        whole = _with_first(first, events)
        return EventStream(_lines(whole, answers, head, form, asked.include_usage, request.state))

    async def _streams(
        self, asked: GenerationOptions, prompts: Sequence[Prompt], answer_id: str, log_id: str
    ) -> list[AsyncGenerator[GenerationEvent]]:
        """One for each prompt, not begun yet."""
        session = requests.session(asked, len(prompts))
        grammar = await self._frontend.compile_grammar(requests.structure(asked))
        token_ids = [prompt.token_ids for prompt in prompts]
        streams = [
            self._frontend.generate(one, session)
            for one in requests.generation_requests(asked, token_ids, grammar, answer_id, log_id)
        ]
        return [_without_answer(one) for one in streams] if asked.token_limit == 0 else streams


async def _fill(answers: Answers, events: Events, asked: GenerationOptions) -> None:
    """Run all generations to their ends."""
    with rest_names(asked):
        async with aclosing(events):
            async for prompt, event in events:
                answers.add(prompt, event)


async def _first(events: Events, asked: GenerationOptions) -> Indexed:
    with rest_names(asked):
        return await anext(events)


async def _without_answer(
    events: AsyncGenerator[GenerationEvent],
) -> AsyncGenerator[GenerationEvent]:
    """Of a generation whose answer nobody wants, what concerns its prompt."""
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Finished) and event.reason is not FinishReason.CANCELLED:
                yield Finished(FinishReason.LENGTH, 0, event.index)
            elif not isinstance(event, Delta):
                yield event


async def _with_first(first: Indexed, events: Events) -> Events:
    async with aclosing(events):
        yield first
        async for item in events:
            yield item


async def _lines(
    events: Events,
    answers: Answers,
    head: Head,
    form: Format,
    include_usage: bool,
    state: State,
) -> AsyncGenerator[bytes]:
    """Server-sent events: chunks, the usage if asked for, [DONE]; or an error and no more."""
    rest: Json = {"usage": None} if include_usage else {}
    try:
        async with aclosing(events):
            async for prompt, event in events:
                answers.add(prompt, event)
                for choice in chunks(form, answers, prompt, event):
                    yield _line(head.object(form.chunk_kind, [choice], **rest))
        if include_usage:
            yield _line(head.object(form.chunk_kind, [], usage=answers.usage()))
        yield b"data: [DONE]\n\n"
    except Exception as error:  # too late for a status: the client learns of it in the stream
        content = errors.described(error)[1]
        state.error = content["error"]["code"]  # for the log, whose status is 200
        yield _line(content)


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
