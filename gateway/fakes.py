"""Workers for tests: small, honest, and predictable.

`FakeKvStore` allocates real blocks and refuses what the contract refuses.
`FakeCompute` writes to a memory of slots and reads it back, so a block that is
used before it was granted, or shared before it was computed, is found out. Its
next token is a function of the tokens before it, given by `expected_tokens`.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from gateway.errors import StepRefused, WorkerUnavailable
from gateway.fake_kvstore import ContractBroken, FakeKvStore
from gateway.ports import (
    ModelInfo,
    PoolInfo,
    SampledToken,
    SamplingOptions,
    SequenceState,
    Step,
    StepResult,
)

__all__ = ["ContractBroken", "FakeCompute", "FakeKvStore", "FakeStream", "expected_tokens"]


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


@dataclass(slots=True)
class _Known:
    token_ids: list[int]
    block_ids: list[int]
    sampling: SamplingOptions


@dataclass(slots=True)
class FakeCompute:
    """The step runner's contract; the KV of a token is a digest of the tokens up to it.

    `script` gives the token after those so far, instead of the drawn one.
    `delay` is what a step takes in seconds. `is_down` makes it unreachable, and
    `dies_at_step` makes it so from that step on.
    """

    kv: FakeKvStore
    vocab_size: int = 1000
    max_sequence_length: int = 256
    script: Callable[[Sequence[int]], int] | None = None
    delay: float = 0.0
    is_down: bool = False
    hangs: bool = False
    dies_at_step: int | None = None
    refuses_step: int | None = None
    steps: list[Step] = field(default_factory=list)
    slots: dict[int, int] = field(default_factory=dict)
    stream: FakeStream | None = None

    async def get_model(self) -> ModelInfo:
        self._check()
        pool = PoolInfo(self.kv.block_size, self.kv.num_blocks, generation=1)
        return ModelInfo("fake", b"f" * 32, self.vocab_size, self.max_sequence_length, pool)

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
        self._queue: asyncio.Queue[tuple[Step, dict[str, int]]] = asyncio.Queue()

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

    def granted(self) -> dict[str, int]:
        """Slots of each sequence now; what a step may use, it must have when submitted."""
        kv = self._compute.kv
        return {key: len(entry.block_ids) * kv.block_size for key, entry in kv.sequences.items()}

    def run(self, step: Step, granted: dict[str, int]) -> StepResult:
        """The step itself. Raises ContractBroken."""
        for sequence_id in step.closed:
            self._known.pop(sequence_id, None)
        for state in step.sequences:
            self._learn(state)
        for extension in step.extensions:
            table = self._known[extension.sequence_id].block_ids
            if extension.first_index != len(table):
                raise ContractBroken(f"a gap in the table: {extension}")
            table += extension.block_ids
        tokens = []
        for chunk in step.chunks:
            known = self._known[chunk.sequence_id]
            end = chunk.start + chunk.num_tokens
            if end > granted.get(chunk.sequence_id, 0):
                raise ContractBroken(f"{chunk.sequence_id}: {end} slots were not granted")
            digest = self._write(chunk.sequence_id, known, chunk.start, end)
            if chunk.sample:
                tokens.append(self._sample(chunk.sequence_id, known, digest))
        return StepResult(step.step_id, tokens, self._compute.delay)

    def _learn(self, state: SequenceState) -> None:
        self._known[state.sequence_id] = _Known(
            list(state.token_ids), list(state.block_ids), state.sampling
        )

    def _write(self, sequence_id: str, known: _Known, start: int, end: int) -> int:
        """Read all slots before the chunk, write its own; returns the last digest."""
        size = self._compute.kv.block_size
        if not start < end <= len(known.token_ids):
            raise ContractBroken(f"{sequence_id}: tokens [{start}, {end}) are not known")
        if sequence_id not in self._compute.kv.sequences:
            raise WorkerUnavailable("the pool of the fake kvstore was replaced")
        table = self._compute.kv.sequences[sequence_id].block_ids
        if known.block_ids != table[: len(known.block_ids)]:
            raise ContractBroken(f"{sequence_id}: not the kvstore's table")
        digest = 0
        for position in range(end):
            digest = _digest(known.token_ids[position], digest)
            slot = known.block_ids[position // size] * size + position % size
            if position >= start:
                self._compute.slots[slot] = digest
            elif self._compute.slots.get(slot) != digest:
                raise ContractBroken(f"{sequence_id}: slot of token {position} holds other KV")
        return digest

    def _sample(self, sequence_id: str, known: _Known, digest: int) -> SampledToken:
        compute, position = self._compute, len(known.token_ids)
        token_id = _draw(digest, known.sampling, position, compute.vocab_size)
        if compute.script is not None:
            token_id = compute.script(known.token_ids)
        known.token_ids.append(token_id)
        logprob = -0.5 if known.sampling.return_logprob else None
        return SampledToken(sequence_id, token_id, logprob)
