"""A step runner for tests: small, honest, and predictable.

It writes to a memory of slots and reads it back, so a block that is used before it was
granted, or shared before it was computed, is found out. Its next token is a function of
the tokens before it, given by `expected_tokens`.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from gateway.errors import StepRefused, WorkerUnavailable
from gateway.fake_kvstore import ContractBroken, FakeKvStore
from gateway.ports import (
    Candidates,
    Chunk,
    ModelInfo,
    PoolInfo,
    PromptLogprobs,
    SampledToken,
    SamplingOptions,
    SequenceFailure,
    SequenceState,
    Step,
    StepResult,
    TokenLogprob,
)

# Block tables of the kvstore when a step was submitted: what it may use.
Granted = dict[str, list[int]]


def _digest(token_id: int, before: int) -> int:
    return zlib.crc32(token_id.to_bytes(4, "little"), before)


def _draw(digest: int, sampling: SamplingOptions, position: int, vocab_size: int) -> int:
    text = f"{digest} {sampling.seed} {sampling.sequence_index} {position}"
    return zlib.crc32(text.encode()) % vocab_size


def expected_tokens(
    prompt_ids: Iterable[int], num_tokens: int, sampling: SamplingOptions, vocab_size: int
) -> list[int]:
    """What FakeCompute continues a prompt with, whatever the schedule."""
    tokens, digest = list(prompt_ids), 0
    for token_id in tokens:
        digest = _digest(token_id, digest)
    generated: list[int] = []
    for position in range(len(tokens), len(tokens) + num_tokens):
        generated.append(_draw(digest, sampling, position, vocab_size))
        digest = _digest(generated[-1], digest)
    return generated


def expected_candidates(
    token_ids: Iterable[int], num_candidates: int, vocab_size: int
) -> list[TokenLogprob]:
    """What FakeCompute reports as the likeliest tokens after these."""
    digest = 0
    for token_id in token_ids:
        digest = _digest(token_id, digest)
    first = digest % vocab_size
    return [
        TokenLogprob((first + 7 * rank) % vocab_size, -0.1 - 0.01 * (digest % 50) - 0.3 * rank)
        for rank in range(min(num_candidates, vocab_size))
    ]


@dataclass(slots=True)
class _Known:
    token_ids: list[int]
    block_ids: list[int]
    sampling: SamplingOptions
    num_prompt_tokens: int


@dataclass(slots=True)
class FakeCompute:
    """The step runner's contract; the KV of a token is a digest of the tokens up to it.

    `script` gives the token after those so far, instead of the drawn one, and
    `draft_script` what a draft model guesses. `delay` is what a step takes in seconds.
    `is_down` makes it unreachable, and `dies_at_step` makes it so from that step on.
    `fails` are sequences that it cannot go on with, by the beginning of their ids.
    """

    kv: FakeKvStore
    vocab_size: int = 1000
    max_sequence_length: int = 256
    script: Callable[[Sequence[int]], int] | None = None
    draft_script: Callable[[Sequence[int]], int] | None = None
    delay: float = 0.0
    is_down: bool = False
    hangs: bool = False
    dies_at_step: int | None = None
    refuses_step: int | None = None
    fails: tuple[str, ...] = ()
    steps: list[Step] = field(default_factory=list)
    slots: dict[int, int] = field(default_factory=dict)
    stream: FakeStream | None = None

    async def get_model(self) -> ModelInfo:
        self._check()
        pool = PoolInfo(self.kv.block_size, self.kv.num_blocks, generation=1)
        has_draft = self.draft_script is not None
        return ModelInfo(
            "fake", b"f" * 32, self.vocab_size, self.max_sequence_length, pool, has_draft
        )

    async def open_stream(self) -> FakeStream:
        self._check()
        if self.stream is not None:
            raise WorkerUnavailable("another stream is open")
        self.stream = FakeStream(self)
        return self.stream

    async def close(self) -> None:
        await asyncio.sleep(0)

    def _check(self) -> None:
        if self.is_down:
            raise WorkerUnavailable("the fake compute is down")


class FakeStream:
    """One driver's stream of steps."""

    def __init__(self, compute: FakeCompute) -> None:
        self._compute = compute
        self._known: dict[str, _Known] = {}
        self._written: set[int] = set()  # slots, by the step that runs
        self._queue: asyncio.Queue[tuple[Step, Granted]] = asyncio.Queue()

    async def submit(self, step: Step) -> None:
        compute = self._compute
        if compute.dies_at_step is not None and len(compute.steps) + 1 >= compute.dies_at_step:
            compute.is_down = True
        compute._check()
        compute.steps.append(step)
        await self._queue.put((step, self.granted()))

    async def result(self) -> StepResult:
        step, granted = await self._queue.get()
        await asyncio.sleep(self._compute.delay)
        if self._compute.hangs:
            await asyncio.Event().wait()
        self._compute._check()
        if self._compute.refuses_step == len(self._compute.steps):
            raise StepRefused("the fake compute refuses this step")
        return self.run(step, granted)

    async def close(self) -> None:
        await asyncio.sleep(0)
        self._compute.stream = None

    def granted(self) -> Granted:
        """What a step may use, it must have when it is submitted."""
        return {key: list(entry.block_ids) for key, entry in self._compute.kv.sequences.items()}

    def run(self, step: Step, granted: Granted) -> StepResult:
        """The step itself. Raises ContractBroken."""
        for sequence_id in step.closed:
            self._known.pop(sequence_id, None)
        for state in step.sequences:
            self._learn(state)
        for extension in step.extensions:
            table = self._known[extension.sequence_id].block_ids
            if extension.first_index > len(table):
                raise ContractBroken(f"a gap in the table: {extension}")
            first, new = extension.first_index, extension.block_ids
            table[first : first + len(new)] = new
        self._copy(step)
        self._written.clear()
        result = StepResult(step.step_id, [], self._compute.delay, 0.0, [], [], [])
        for chunk in step.chunks:
            self._run_chunk(chunk, granted, result)
        return result

    def _copy(self, step: Step) -> None:
        size, slots = self._compute.kv.block_size, self._compute.slots
        for source, target in step.copies:
            for offset in range(size):
                held = slots.get(source * size + offset)
                if held is not None:
                    slots[target * size + offset] = held

    def _learn(self, state: SequenceState) -> None:
        self._known[state.sequence_id] = _Known(
            list(state.token_ids),
            list(state.block_ids),
            state.sampling,
            state.num_prompt_tokens,
        )

    def _run_chunk(self, chunk: Chunk, granted: Granted, result: StepResult) -> None:
        known, sequence_id = self._known[chunk.sequence_id], chunk.sequence_id
        known.token_ids += chunk.token_ids
        if chunk.num_drafts and not chunk.token_ids:
            self._make_guesses(known, chunk.num_drafts)
        end = chunk.start + chunk.num_tokens
        if chunk.sample and end != len(known.token_ids):
            raise ContractBroken(f"{sequence_id}: samples after token {end}")
        digest = self._write(known, chunk, granted.get(sequence_id, []))
        self._score(known, chunk, result)
        if not chunk.sample:
            return
        if self._compute.fails and sequence_id.startswith(self._compute.fails):
            failures = result.failures
            assert isinstance(failures, list)
            failures.append(SequenceFailure(sequence_id, "LOGITS_NOT_FINITE", "it is broken"))
        elif known.sampling.num_candidates:
            tokens = expected_candidates(
                known.token_ids, known.sampling.num_candidates, self._compute.vocab_size
            )
            assert isinstance(result.candidates, list)
            result.candidates.append(Candidates(sequence_id, tokens))
        elif chunk.num_drafts:
            self._verify(sequence_id, known, chunk.num_drafts, result)
        else:
            result.tokens.append(self._sample(sequence_id, known, digest))

    def _make_guesses(self, known: _Known, num_drafts: int) -> None:
        script = self._compute.draft_script
        if script is None:
            raise ContractBroken("there is no draft model")
        for _ in range(num_drafts):
            known.token_ids.append(script(known.token_ids))

    def _write(self, known: _Known, chunk: Chunk, table: list[int]) -> int:
        """Read all slots before the chunk, write its own; returns the last digest."""
        size, slots, sequence_id = (
            self._compute.kv.block_size,
            self._compute.slots,
            chunk.sequence_id,
        )
        start, end = chunk.start, chunk.start + chunk.num_tokens
        if not 0 <= start < end <= len(known.token_ids):
            raise ContractBroken(f"{sequence_id}: tokens [{start}, {end}) are not known")
        if not table:
            raise WorkerUnavailable("the pool of the fake kvstore was replaced")
        if end > len(table) * size:
            raise ContractBroken(f"{sequence_id}: {end} slots were not granted")
        if known.block_ids[: -(-end // size)] != table[: -(-end // size)]:
            raise ContractBroken(f"{sequence_id}: not the kvstore's table")
        digest = 0
        for position in range(end):
            digest = _digest(known.token_ids[position], digest)
            slot = known.block_ids[position // size] * size + position % size
            if position >= start:
                if slot in self._written:
                    raise ContractBroken(f"{sequence_id}: token {position} shares its slot")
                self._written.add(slot)
                slots[slot] = digest
            elif slots.get(slot) != digest:
                raise ContractBroken(f"{sequence_id}: slot of token {position} holds other KV")
        return digest

    def _score(self, known: _Known, chunk: Chunk, result: StepResult) -> None:
        if not known.sampling.return_prompt_logprobs:
            return
        first = chunk.start + 1
        last = min(chunk.start + chunk.num_tokens + 1, known.num_prompt_tokens)
        tokens = [
            SampledToken(chunk.sequence_id, known.token_ids[position], -0.25)
            for position in range(first, last)
        ]
        if tokens:
            assert isinstance(result.prompt_logprobs, list)
            result.prompt_logprobs.append(PromptLogprobs(chunk.sequence_id, first, tokens))

    def _verify(self, sequence_id: str, known: _Known, num_drafts: int, result: StepResult) -> None:
        guesses = known.token_ids[-num_drafts:]
        del known.token_ids[-num_drafts:]
        for guess in [*guesses, None]:
            digest = 0
            for token_id in known.token_ids:
                digest = _digest(token_id, digest)
            token = self._sample(sequence_id, known, digest)
            result.tokens.append(token)
            if token.token_id != guess:
                return

    def _sample(self, sequence_id: str, known: _Known, digest: int) -> SampledToken:
        compute, position = self._compute, len(known.token_ids)
        token_id = _draw(digest, known.sampling, position, compute.vocab_size)
        if compute.script is not None:
            token_id = compute.script(known.token_ids)
        known.token_ids.append(token_id)
        logprob = -0.5 if known.sampling.return_logprob else None
        return SampledToken(sequence_id, token_id, logprob)
