"""An engine without a model, and the REST interface in front of it."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import dataclass, field

import grpc
import httpx
import pytest
from quire.gateway.v1 import gateway_pb2_grpc as pb_grpc

from gateway.detokenizer import Detokenizer
from gateway.errors import InvalidField, RequestNotFound
from gateway.ports import ModelInfo, PoolInfo, TokenLogprob
from gateway.stats import Counters, EngineStats, PreemptionStats, SpeculationStats
from gateway.types import Delta, Finished, FinishReason, PromptScored, ScoredToken, Started
from gateway.validation import validate_request
from services.common.server import GrpcServer
from services.gateway.frontend import Frontend
from services.gateway.metrics import Metrics
from services.gateway.rest.app import create_app
from services.gateway.rest.server import RestServer
from services.gateway.servicer import SERVICE, GenerationServicer

MODEL = ModelInfo("fake/model", b"\x01" * 32, 256, 512, PoolInfo(16, 64, 1))


class ByteTokenizer:
    """One token per byte of UTF-8."""

    longest_token = 1
    strips_first_space = False

    def encode(self, text):
        return list(text.encode())

    def encode_continuation(self, text):
        return list(text.encode())

    def decode(self, token_ids):
        return bytes(token_ids).decode(errors="replace")

    def bytes_of(self, token_id):
        return bytes([token_id])

    token_bytes = bytes_of

    def detokenizer(self):
        return Detokenizer(self)

    def render_chat(self, messages):
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages))


def scored(token_id, sampling):
    """The token, and the lowest ones as the likeliest."""
    top = tuple(TokenLogprob(other, -other / 1000) for other in range(sampling.num_top_logprobs))
    return ScoredToken(token_id, -token_id / 1000, top)


class FakeCompiler:
    """Remembers what was compiled; refuses what is called bad."""

    def __init__(self):
        self.structures = []

    async def compile(self, structure):
        self.structures.append(structure)
        if "bad" in structure.text:
            raise InvalidField(structure.field, f"{structure.field}: it is bad")
        return f"{structure.kind} {structure.text}"

    async def close(self):
        pass


@dataclass
class FakeEngine:
    """Answers a prompt with the prompt in capitals, a character and a token at a time;
    a continuation leaves out as many characters as its index.

    `error` is raised instead of `num_before_error` deltas' successor. While `gate` is
    unset, nothing is generated. A log-probability is minus a thousandth of the token.
    """

    error: Exception | None = None
    num_before_error: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    ready: bool = True
    model: ModelInfo = MODEL
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    requests: list = field(default_factory=list)
    running: dict = field(default_factory=dict)
    endings: Counter = field(default_factory=Counter)
    stop: str | int | None = None
    pins: dict = field(default_factory=dict)
    pin_error: Exception | None = None

    def __post_init__(self):
        self.gate.set()

    def is_ready(self):
        return self.ready

    def stats(self):
        return EngineStats(
            self.ready,
            len(self.running),
            0,
            0,
            PreemptionStats(),
            SpeculationStats(),
            Counters(num_steps=7),
        )

    def cancel(self, request_id):
        if request_id not in self.running:
            raise RequestNotFound(request_id)
        self.running[request_id].set()

    async def generate(self, request):
        self.requests.append(request)
        validate_request(request, self.model)
        cancelled = self.running[request.request_id] = asyncio.Event()
        ending = "closed"
        try:
            if self.error and not self.num_before_error:
                raise self.error
            yield Started(request.request_id, len(request.prompt_ids), 16)
            sampling = request.sampling
            if sampling.return_prompt_logprobs:
                yield PromptScored([scored(token, sampling) for token in request.prompt_ids[1:]])
            text = self.tokenizer.decode(request.prompt_ids).upper()
            limit = request.max_tokens or len(text)
            for done, index in itertools.product(range(limit), range(request.n)):
                if index + done >= len(text):
                    continue
                if self.error and done == self.num_before_error:
                    raise self.error
                await self._pause(cancelled)
                if cancelled.is_set():
                    ending = "cancelled"
                    for ended in range(request.n):
                        yield Finished(FinishReason.CANCELLED, done, ended)
                    return
                character = text[index + done]
                token = character.encode()[0]
                scores = [scored(token, sampling)] if sampling.return_logprob else []
                yield Delta(character, [token], scores, index)
            ending = "finished"
            for index in range(request.n):
                length = len(text) - index
                reason = FinishReason.LENGTH if limit < length else FinishReason.STOP
                stop = self.stop if reason is FinishReason.STOP else None
                score = -0.25 if request.beams else None
                yield Finished(reason, min(limit, length), index, stop, score)
        finally:
            del self.running[request.request_id]
            self.endings[ending] += 1

    async def pin_prefix(self, plan):
        if self.pin_error:
            raise self.pin_error
        self.pins[plan.pin_id] = plan

    async def unpin(self, pin_id):
        self.pins.pop(pin_id, None)

    async def _pause(self, cancelled):
        waits = [asyncio.ensure_future(event.wait()) for event in (self.gate, cancelled)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def compiler():
    return FakeCompiler()


@pytest.fixture
async def frontend(engine, compiler):
    frontend = Frontend(engine, Metrics(), compiler)
    yield frontend
    await frontend.close()


@pytest.fixture
def app(frontend):
    return create_app(frontend, max_body_bytes=64 * 1024)


@pytest.fixture
async def client(app):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://quire") as client:
        yield client


@pytest.fixture
async def url(app):
    """The same over a real socket."""
    server = RestServer(app, "127.0.0.1:0")
    await server.start()
    yield f"http://{server.address}"
    await server.stop(grace=1)


@pytest.fixture
async def channel(frontend, tmp_path):
    address = f"unix:{tmp_path}/gateway.sock"
    server = GrpcServer(
        address,
        [SERVICE],
        lambda it: pb_grpc.add_GenerationServiceServicer_to_server(
            GenerationServicer(frontend), it
        ),
    )
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield channel
    await server.stop(grace=0)


@pytest.fixture
def stub(channel):
    return pb_grpc.GenerationServiceStub(channel)


@pytest.fixture
def until():
    async def until(condition):
        """Wait for something that must happen; the test's time limit is the bound."""
        while not condition():  # noqa: ASYNC110 - nothing to wait on
            await asyncio.sleep(0.005)

    return until
