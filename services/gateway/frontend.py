"""What REST and gRPC have in common: prompts into tokens, generations, their metrics."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from gateway.detokenizer import Detokenizer
from gateway.engine import Engine
from gateway.errors import InvalidField, ModelNotFound
from gateway.grammar import GrammarCompiler, Structure
from gateway.ports import ModelInfo, Namespace
from gateway.sessions import SessionOptions, Sessions, Turn
from gateway.types import (
    Delta,
    Finished,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    Started,
)
from gateway.validation import MAX_MESSAGES, validate_length, validate_text
from services.common.errors import status_of
from services.gateway.metrics import Metrics

# Above this, tokenizing takes long enough to delay the tokens of others.
_LONG_TEXT = 4096

Conversation = Sequence[dict[str, str]]


class Frontend:
    """The engine as applications see it. One event loop owns it.

    Without `grammars` it makes a compiler for the engine's model with the first one.
    """

    def __init__(
        self, engine: Engine, metrics: Metrics, grammars: GrammarCompiler | None = None
    ) -> None:
        self.metrics = metrics
        self._engine = engine
        self._grammars = grammars
        self._sessions = Sessions(engine)
        metrics.add_engine(engine.stats)
        metrics.add_sessions(self._sessions)

    def model(self, name: str) -> ModelInfo:
        """The served model of that name. Raises ModelNotFound."""
        model = self._engine.model
        if name != model.model_id:
            raise ModelNotFound(name)
        return model

    def default_model(self) -> ModelInfo:
        """The only one, so far."""
        return self._engine.model

    def models(self) -> list[ModelInfo]:
        return [self._engine.model]

    def is_ready(self) -> bool:
        return self._engine.is_ready()

    def check_texts(self, texts: Sequence[str]) -> None:
        """Raises InvalidField("prompt") for one that is too long to be tokenized."""
        for text in texts:
            self._check_text("prompt", len(text))

    def check_conversation(self, messages: Conversation) -> None:
        """Raises InvalidField("messages") for one that is too long to be tokenized."""
        validate_length("messages", messages, MAX_MESSAGES)
        size = sum(len(message["content"]) for message in messages)
        self._check_text("messages", size)

    def _check_text(self, field: str, num_characters: int) -> None:
        engine = self._engine
        validate_text(field, num_characters, engine.tokenizer.longest_token, engine.model)

    async def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text."""
        encode = self._engine.tokenizer.encode
        if sum(map(len, texts)) < _LONG_TEXT:
            return [encode(text) for text in texts]
        return await asyncio.to_thread(lambda: [encode(text) for text in texts])

    async def tokenize_continuation(self, text: str) -> list[int]:
        """Token ids of text that comes after other tokens."""
        encode = self._engine.tokenizer.encode_continuation
        return encode(text) if len(text) < _LONG_TEXT else await asyncio.to_thread(encode, text)

    async def tokenize_chat(self, messages: Conversation) -> list[int]:
        """The conversation and the start of the assistant's next message."""
        if sum(len(message["content"]) for message in messages) < _LONG_TEXT:
            return self._engine.tokenizer.render_chat(messages)
        return await asyncio.to_thread(self._engine.tokenizer.render_chat, messages)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Raises InvalidField if one is not in the vocabulary, or if they are more than the
        model takes: text is made on the event loop, which others wait for."""
        model = self._engine.model
        validate_length("token_ids", token_ids, model.max_sequence_length)
        for token_id in token_ids:
            if not 0 <= token_id < model.vocab_size:
                text = f"token_ids: {token_id} is not from 0 to {model.vocab_size - 1}"
                raise InvalidField("token_ids", text)
        return self._engine.tokenizer.decode(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """What to show a token as."""
        return self._engine.tokenizer.token_bytes(token_id)

    def detokenizer(self) -> Detokenizer:
        return self._engine.tokenizer.detokenizer()

    async def compile_grammar(self, structure: Structure | None) -> str:
        """The grammar for the sampler, empty for none. Raises InvalidField."""
        if structure is None:
            return ""
        outcome = "refused"
        try:
            grammar = await self._compiler().compile(structure)
            outcome = "accepted"
        finally:
            self.metrics.grammars.labels(outcome).inc()
        return grammar

    def _compiler(self) -> GrammarCompiler:
        if self._grammars is None:
            # The logits may be wider than the tokenizer's vocabulary, for alignment.
            tokenizer, vocab_size = self._engine.tokenizer, self._engine.model.vocab_size
            vocab_size = max(vocab_size, tokenizer.vocab_size)
            self._grammars = GrammarCompiler(tokenizer.file, vocab_size, tokenizer.eos_ids)
        return self._grammars

    async def generate(
        self, request: GenerationRequest, session: SessionOptions | None = None
    ) -> AsyncGenerator[GenerationEvent]:
        """The engine's events. Closing the iterator cancels the request.

        With `session` the prompt comes after its source's tokens, and prompt and first
        answer are kept before the last event. Raises what `Sessions.begin` does.
        """
        observer = _Observer(self.metrics)
        try:
            events = self._events(request, session)
            async with aclosing(events):
                async for event in events:
                    observer.observe(event)
                    yield event
        except Exception as error:
            observer.outcome = "refused" if status_of(error).http < 500 else "error"
            raise
        finally:
            observer.end()

    def _events(
        self, request: GenerationRequest, session: SessionOptions | None
    ) -> AsyncGenerator[GenerationEvent]:
        if session is None:
            return self._engine.generate(request)
        return self._turn(request, session)

    async def _turn(
        self, request: GenerationRequest, session: SessionOptions
    ) -> AsyncGenerator[GenerationEvent]:
        turn = self._sessions.begin(request.tenant, session)
        try:
            if not request.prompt_ids:  # the source's tokens would hide that
                raise InvalidField("prompt", "prompt must have at least one token")
            prompt_ids = [*turn.prefix, *request.prompt_ids]
            request = dataclasses.replace(request, prompt_ids=prompt_ids)
            answer: list[int] = []
            num_running = request.n
            async with aclosing(self._engine.generate(request)) as events:
                async for event in events:
                    if isinstance(event, Delta) and event.index == 0:
                        answer += event.token_ids
                    elif isinstance(event, Finished):
                        num_running -= 1
                        if not num_running:  # who reads this may send the next turn at once
                            self._keep(turn, request, [*prompt_ids, *answer])
                    yield event
        finally:
            self._sessions.end(turn)

    def _keep(self, turn: Turn, request: GenerationRequest, token_ids: list[int]) -> None:
        # As the scheduler makes it of a request.
        fingerprint = self._engine.model.fingerprint
        namespace = Namespace(fingerprint, tenant=request.tenant, salt=request.salt)
        is_findable = not request.sampling.return_prompt_logprobs
        self._sessions.keep(turn, token_ids, namespace if is_findable else None)
        self._sessions.end(turn)

    async def close(self) -> None:
        """End what runs beside the engine."""
        await self._sessions.close()
        if self._grammars is not None:
            await self._grammars.close()

    def cancel(self, request_id: str) -> None:
        """Raises RequestNotFound if no such request is running."""
        self._engine.cancel(request_id)

    async def scrape(self) -> bytes:
        return await self.metrics.scrape()


class _Observer:
    """One request's part in the metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self.outcome = "abandoned"
        self._metrics = metrics
        self._began = time.monotonic()
        self._latest: dict[int, float] = {}  # time of the delta before, by continuation

    def observe(self, event: GenerationEvent) -> None:
        if isinstance(event, Started):
            self._metrics.prompt_tokens.inc(event.num_prompt_tokens)
            self._metrics.cached_tokens.inc(event.num_cached_tokens)
        elif isinstance(event, Delta):
            self._observe_delta(event)
        elif isinstance(event, Finished) and self.outcome != FinishReason.CANCELLED:
            self.outcome = event.reason.value

    def _observe_delta(self, delta: Delta) -> None:
        num_tokens, now = len(delta.token_ids), time.monotonic()
        if not num_tokens:
            return
        self._metrics.generated_tokens.inc(num_tokens)
        latest = self._latest.get(delta.index)
        if not self._latest:
            self._metrics.first_token.observe(now - self._began)
        elif latest is not None:
            for _ in range(num_tokens):
                self._metrics.between_tokens.observe((now - latest) / num_tokens)
        self._latest[delta.index] = now

    def end(self) -> None:
        self._metrics.generations.labels(self.outcome).inc()
        self._metrics.whole.observe(time.monotonic() - self._began)


def new_seed() -> int:
    """For a request that gave none."""
    return secrets.randbits(63)


def renamed(error: InvalidField, field: str) -> InvalidField:
    """The same error for a field that its client knows as `field`."""
    text = str(error)
    if text.startswith(error.field):
        text = field + text.removeprefix(error.field)
    elif error.field == "max_tokens":  # stands in the middle of a sentence, and means nothing else
        text = text.replace(error.field, field)
    return InvalidField(field, text, reason=error.reason)
