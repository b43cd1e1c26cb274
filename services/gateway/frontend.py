"""What REST and gRPC have in common: prompts into tokens, generations, their metrics."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from gateway.engine import Engine
from gateway.errors import InvalidField, ModelNotFound
from gateway.ports import ModelInfo
from gateway.types import Delta, GenerationEvent, GenerationRequest, Started
from gateway.validation import validate_text
from services.common.errors import status_of
from services.gateway.metrics import Metrics

# Above this, tokenizing takes long enough to delay the tokens of others.
_LONG_TEXT = 4096

Conversation = Sequence[dict[str, str]]


class Frontend:
    """The engine as applications see it. One event loop owns it."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self.metrics = metrics
        self._engine = engine
        metrics.add_engine(engine.stats)

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

    async def tokenize_chat(self, messages: Conversation) -> list[int]:
        """The conversation and the start of the assistant's next message."""
        if sum(len(message["content"]) for message in messages) < _LONG_TEXT:
            return self._engine.tokenizer.render_chat(messages)
        return await asyncio.to_thread(self._engine.tokenizer.render_chat, messages)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Raises InvalidField if one is not in the vocabulary."""
        vocab_size = self._engine.model.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                text = f"token_ids: {token_id} is not from 0 to {vocab_size - 1}"
                raise InvalidField("token_ids", text)
        return self._engine.tokenizer.decode(token_ids)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent]:
        """The engine's events. Closing the iterator cancels the request."""
        metrics, began = self.metrics, time.monotonic()
        latest, outcome = 0.0, "abandoned"
        try:
            async with aclosing(self._engine.generate(request)) as events:
                async for event in events:
                    if isinstance(event, Started):
                        metrics.prompt_tokens.inc(event.num_prompt_tokens)
                        metrics.cached_tokens.inc(event.num_cached_tokens)
                    elif isinstance(event, Delta):
                        latest = self._observe_delta(event, began, latest)
                    else:
                        outcome = event.reason.value
                    yield event
        except Exception as error:
            outcome = "refused" if status_of(error).http < 500 else "error"
            raise
        finally:
            metrics.generations.labels(outcome).inc()
            metrics.whole.observe(time.monotonic() - began)

    def _observe_delta(self, delta: Delta, began: float, latest: float) -> float:
        """`latest` is the time of the delta before, 0 if there was none; returns this one's."""
        num_tokens = len(delta.token_ids)
        if not num_tokens:
            return latest
        now = time.monotonic()
        self.metrics.generated_tokens.inc(num_tokens)
        if not latest:
            self.metrics.first_token.observe(now - began)
        else:
            for _ in range(num_tokens):
                self.metrics.between_tokens.observe((now - latest) / num_tokens)
        return now

    def cancel(self, request_id: str) -> None:
        """Raises RequestNotFound if no such request is running."""
        self._engine.cancel(request_id)

    async def scrape(self) -> bytes:
        return await self.metrics.scrape()


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
