"""A tiny byte-level tokenizer, a scheduler whose turns are checked, an engine over fakes."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from gateway.engine import Engine, EngineSettings
from gateway.errors import GatewayError
from gateway.fakes import FakeCompute, FakeKvStore, FakeStream, expected_tokens
from gateway.group import SequenceGroup, Stage
from gateway.limits import Limits
from gateway.ports import ModelInfo, PoolInfo, SamplingOptions
from gateway.scheduler import Scheduler
from gateway.tokenizer import Tokenizer
from gateway.types import Delta, FinishReason, GenerationRequest

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EOS_ID = 256
VOCAB_SIZE = 1000


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory):
    """A directory with the files of a model whose tokens are single bytes."""
    directory = tmp_path_factory.mktemp("byte_model")
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable}
    names |= {byte: chr(0x100 + index) for index, byte in enumerate(others)}
    vocab = {names[byte]: byte for byte in range(256)}
    splitter = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    splitter.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    splitter.decoder = decoders.ByteLevel()
    splitter.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    splitter.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": EOS_ID}))
    return directory


@pytest.fixture(scope="session")
def byte_tokenizer(byte_model):
    return Tokenizer.load(byte_model)


@pytest.fixture(scope="session")
def real_tokenizer(model_files):
    return Tokenizer.load(model_files.directory)


class Cell:
    """A scheduler with fake workers, turned by hand and checked at every turn.

    Invariants asserted after every turn; `outputs` are the tokens by request id."""

    def __init__(self, *, num_blocks=64, block_size=4, eos_ids=(), kv=None, **limits):
        self.kv = FakeKvStore(num_blocks, block_size, **(kv or {}))
        self.now = 0.0
        self.compute = FakeCompute(self.kv, vocab_size=VOCAB_SIZE)
        self.stream = FakeStream(self.compute)
        self.limits = Limits(**limits)
        self.scheduler = Scheduler(self.limits, eos_ids, "cell", lambda: self.now)
        self.scheduler.attach(self.model())
        self.groups: list[SequenceGroup] = []
        self.outputs: dict[str, list[int]] = {}  # of continuation i > 0: "r0/i"
        self.finishes: dict[str, FinishReason] = {}
        self.scores: dict[str, float] = {}
        self.prompt_scores: dict[str, list] = {}
        self.failures: list[tuple[SequenceGroup, GatewayError]] = []
        self.first_opens: list[str] = []
        self.steps, self.updates = [], []
        self._computed: dict[str, int] = {}  # by sequence id, of finished steps

    def add(self, prompt_ids, max_tokens=8, *, seed=0, sampling=None, **options) -> SequenceGroup:
        request = GenerationRequest(
            f"r{len(self.groups)}",
            list(prompt_ids),
            max_tokens,
            sampling or SamplingOptions(seed=seed),
            **options,
        )
        group = self.scheduler.add(request, len(prompt_ids) + max_tokens)
        self.groups.append(group)
        for index in range(request.num_sequences):
            self.outputs[_name(request.request_id, index)] = []
        return group

    def model(self, **options) -> ModelInfo:
        pool = PoolInfo(self.kv.block_size, self.kv.num_blocks, 1)
        return ModelInfo("m", b"f", VOCAB_SIZE, 10_000, pool, **options)

    def turn(self, *, update_first=True) -> bool:
        """One step and the update beside it. Whether there was anything to do."""
        scheduler = self.scheduler
        step = scheduler.plan_step()
        self.failures += scheduler.take_failures()
        granted = self.stream.granted()
        update = scheduler.plan_update()
        self._check_step(step)
        self._check_commits(update)
        if step is None and not update:
            return False
        changes = self.kv.apply(update) if update and update_first else None
        result = self.stream.run(step, granted) if step else None
        if update and not update_first:
            changes = self.kv.apply(update)
        if changes:
            self.updates.append(update)
            self._note_opened(scheduler.apply_update(changes))
        if result:
            self.steps.append(step)
            for chunk in step.chunks:
                self._computed[chunk.sequence_id] = chunk.start + chunk.num_tokens
            self._note_emissions(scheduler.apply_result(result))
        self._check_states()
        return True

    def run(self, most_turns=2000, **turn) -> None:
        for _ in range(most_turns):
            if not self.turn(**turn):
                return
        raise AssertionError(f"still busy after {most_turns} turns")

    def expected(self, group, index=0) -> list[int]:
        """What continuation `index` of a group is, drawn to the last token."""
        request = group.request
        num = group.max_length - len(request.prompt_ids)
        sampling = dataclasses.replace(request.sampling, sequence_index=index)
        return expected_tokens(request.prompt_ids, num, sampling, VOCAB_SIZE)

    def assert_empty(self) -> None:
        assert self.kv.num_free == self.kv.num_blocks
        assert not self.kv.sequences
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0

    def _note_opened(self, opened) -> None:
        for group in opened:
            request_id = group.request.request_id
            assert request_id not in self.first_opens
            self.first_opens.append(request_id)

    def _note_emissions(self, emissions) -> None:
        for emission in emissions:
            request_id = emission.group.request.request_id
            if emission.prompt is not None:
                self.prompt_scores.setdefault(request_id, []).append(emission.prompt)
                continue
            name = _name(request_id, emission.index)
            assert name not in self.finishes
            self.outputs[name] += [token.token_id for token in emission.tokens]
            if emission.finish:
                self.finishes[name] = emission.finish
            if emission.score is not None:
                self.scores[name] = emission.score

    def _check_step(self, step) -> None:
        if step is None:
            return
        ids = [chunk.sequence_id for chunk in step.chunks]
        assert len(ids) == len(set(ids)) <= self.limits.max_running
        assert sum(chunk.num_tokens for chunk in step.chunks) <= self.limits.token_budget

    def _check_commits(self, update) -> None:
        for commit in update.commits:
            computed = self._computed.get(commit.sequence_id)
            assert computed is None or commit.num_computed_tokens <= computed

    def _check_states(self) -> None:
        scheduler = self.scheduler
        running, queue = scheduler._running, list(scheduler._admission.queue)
        asked = {sequence.group for sequence in scheduler._admission.asked.values()}
        leaving = {sequence.group for sequence in scheduler._suspending.values()}
        places = [*running, *queue, *asked, *leaving]
        assert len(set(places)) == len(places)
        assert running == sorted(running)
        assert queue == sorted(queue)
        assert all(group.stage in (Stage.WAITING, Stage.SUSPENDED) for group in queue)
        for group in running:
            assert group.stage is Stage.RUNNING
            for s in group.sequences:
                assert not s.is_ended
                assert s.num_committed <= s.num_computed <= len(s.token_ids)


def _name(request_id, index):
    return f"{request_id}/{index}" if index else request_id


@pytest.fixture(scope="session")
def new_cell():
    return Cell


class Bench:
    """An engine over fake workers, with short times, and what clients saw."""

    def __init__(self, tokenizer, *, num_blocks=64, block_size=4, limits=None, **compute):
        self.kv = FakeKvStore(num_blocks, block_size)
        self.compute = FakeCompute(self.kv, **{"vocab_size": 256, **compute})
        quick = {"probe_interval": 0.02, "first_backoff": 0.005, "last_backoff": 0.01}
        self.settings = EngineSettings(limits=limits or Limits(), drain_timeout=0.2, **quick)
        self.tokenizer = tokenizer
        self.engine = Engine(self.kv, self.compute, tokenizer, self.settings)

    def set(self, **settings):
        """Other settings; before the start."""
        self.settings = dataclasses.replace(self.settings, **settings)
        self.engine = Engine(self.kv, self.compute, self.tokenizer, self.settings)

    async def start(self):
        await self.engine.start()
        await self.until(self.engine.is_ready)

    async def until(self, condition):
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - of any kind
                await asyncio.sleep(0.002)

    async def events(self, prompt, **options):
        """All events of one request."""
        return [event async for event in self.engine.generate(request(prompt, **options))]

    async def text(self, prompt, **options):
        """The text and the finish reason of one request."""
        events = await self.events(prompt, **options)
        return "".join(e.text for e in events if isinstance(e, Delta)), events[-1].reason

    def begin(self, prompt, **options):
        """A request in the background; its events so far, and its task."""
        seen = []

        async def read():
            async for event in self.engine.generate(request(prompt, **options)):
                seen.append(event)  # noqa: PERF401 - readable while it runs

        return seen, asyncio.create_task(read())

    async def until_empty(self):
        await self.until(lambda: not self.kv.sequences)
        assert self.kv.num_free == self.kv.num_blocks
        stats = self.engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)


def request(prompt, request_id="r", max_tokens=8, **options):
    prompt_ids = list(prompt.encode() if isinstance(prompt, str) else prompt)
    return GenerationRequest(request_id, prompt_ids, max_tokens, **options)


@pytest.fixture
async def new_bench(byte_tokenizer):
    benches = []

    def make(**options):
        benches.append(Bench(byte_tokenizer, **options))
        return benches[-1]

    yield make
    for bench in benches:
        await bench.engine.stop()


def saying(prompt, answer):
    """A script for FakeCompute: the answer's bytes after the prompt's, then end of text."""
    tokens = [*answer.encode(), EOS_ID]
    return lambda known: tokens[min(len(known) - len(prompt.encode()), len(tokens) - 1)]


@pytest.fixture(scope="session", name="saying")
def saying_fixture():
    return saying
