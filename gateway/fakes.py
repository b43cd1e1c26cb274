"""Workers for tests: small, honest, and predictable.

`FakeKvStore` allocates real blocks and refuses what the contract refuses.
`FakeCompute` writes to a memory of slots and reads it back, so a block that is
used before it was granted, or shared before it was computed, is found out. Its
next token is a function of the tokens before it, given by `expected_tokens`.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from gateway.errors import StepRefused, WorkerUnavailable
from gateway.ports import (
    CommitPlan,
    ExtendedSequence,
    ExtendPlan,
    ModelInfo,
    Namespace,
    OpenedSequence,
    OpenPlan,
    PoolInfo,
    Refusal,
    SampledToken,
    SamplingOptions,
    SequenceState,
    Step,
    StepResult,
    Update,
    UpdateResult,
)

_Key = tuple[Namespace, tuple[int, ...]]


class ContractBroken(Exception):
    """The driver did what the contracts forbid."""


@dataclass(slots=True)
class _Open:
    token_ids: list[int]
    namespace: Namespace
    block_ids: list[int]
    length: int
    num_computed: int


class FakeKvStore:
    """The page manager's contract over a list of free blocks and a dict of prefixes.

    Set `is_down` to make it unreachable.
    """

    def __init__(self, num_blocks: int = 64, block_size: int = 4) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.is_down = False
        self.updates: list[Update] = []
        self.sequences: dict[str, _Open] = {}
        self._ref_counts = [0] * num_blocks
        self._free = deque(range(num_blocks))
        self._cached: dict[_Key, int] = {}
        self._key_of: dict[int, _Key] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    async def become_driver(self, driver_id: str) -> None:  # noqa: ARG002 - for a log
        await asyncio.sleep(0)
        if self.is_down:
            raise WorkerUnavailable("the fake kvstore is down")
        self._close_all()

    async def resign(self) -> None:
        await asyncio.sleep(0)
        if self.is_down:
            raise WorkerUnavailable("the fake kvstore is down")
        self._close_all()

    def _close_all(self) -> None:
        for sequence_id in list(self.sequences):
            self._close(sequence_id)

    async def update_sequences(self, update: Update) -> UpdateResult:
        await asyncio.sleep(0)
        if self.is_down:
            raise WorkerUnavailable("the fake kvstore is down")
        return self.apply(update)

    async def close(self) -> None:
        await asyncio.sleep(0)

    def restart(self) -> None:
        """Lose everything, as a new process would."""
        self.__init__(self.num_blocks, self.block_size)  # type: ignore[misc]

    def apply(self, update: Update) -> UpdateResult:
        if not update:
            raise ContractBroken("an empty update")
        self.updates.append(update)
        result = UpdateResult([], [], [])
        for commit in update.commits:
            self._commit(commit, result)
        for sequence_id in update.closes:
            self._close(sequence_id)
        for extend in update.extends:
            self._extend(extend, result)
        has_room = True
        for plan in update.opens:
            has_room = has_room and self._open(plan, result)
            if not has_room:
                result.refused.append(Refusal(plan.sequence_id, "OUT_OF_BLOCKS", "no room"))
        return result

    def _commit(self, plan: CommitPlan, result: UpdateResult) -> None:
        entry = self.sequences.get(plan.sequence_id)
        if entry is None:
            result.refused.append(Refusal(plan.sequence_id, "SEQUENCE_NOT_FOUND", "unknown"))
            return
        known = entry.token_ids
        overlap = known[plan.token_start : plan.token_start + len(plan.token_ids)]
        if plan.token_start > len(known) or list(plan.token_ids[: len(overlap)]) != overlap:
            raise ContractBroken(f"commit of other tokens: {plan}")
        known += plan.token_ids[len(overlap) :]
        if plan.num_computed_tokens > min(entry.length, len(known)):
            raise ContractBroken(f"commit beyond the sequence: {plan}")
        entry.num_computed = max(entry.num_computed, plan.num_computed_tokens)
        for index in range(entry.num_computed // self.block_size):
            key = entry.namespace, tuple(known[: (index + 1) * self.block_size])
            block_id = entry.block_ids[index]
            if key not in self._cached and block_id not in self._key_of:
                self._cached[key] = block_id
                self._key_of[block_id] = key

    def _close(self, sequence_id: str) -> None:
        entry = self.sequences.pop(sequence_id, None)
        for block_id in reversed(entry.block_ids if entry else []):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free.append(block_id)

    def _extend(self, plan: ExtendPlan, result: UpdateResult) -> None:
        entry = self.sequences.get(plan.sequence_id)
        if entry is None:
            result.refused.append(Refusal(plan.sequence_id, "SEQUENCE_NOT_FOUND", "unknown"))
            return
        first = len(entry.block_ids)
        num_new = -(-plan.length // self.block_size) - first
        if num_new > len(self._free):
            result.refused.append(Refusal(plan.sequence_id, "OUT_OF_BLOCKS", "no room"))
            return
        entry.length = max(entry.length, plan.length)
        if num_new > 0:
            entry.block_ids += [self._take() for _ in range(num_new)]
            result.extended.append(
                ExtendedSequence(plan.sequence_id, first, entry.block_ids[first:])
            )

    def _open(self, plan: OpenPlan, result: UpdateResult) -> bool:
        tokens = list(plan.token_ids)
        num_needed = -(-len(tokens) // self.block_size)
        if num_needed > self.num_blocks:
            result.refused.append(Refusal(plan.sequence_id, "PROMPT_EXCEEDS_POOL", "never fits"))
            return True
        if plan.sequence_id in self.sequences:
            raise ContractBroken(f"opened twice: {plan.sequence_id}")
        hits = []
        for end in range(self.block_size, len(tokens), self.block_size):
            block_id = self._cached.get((plan.namespace, tuple(tokens[:end])))
            if block_id is None:
                break
            hits.append(block_id)
        num_idle_hits = sum(self._ref_counts[block_id] == 0 for block_id in hits)
        if num_needed - len(hits) > len(self._free) - num_idle_hits:
            return False
        for block_id in hits:
            if self._ref_counts[block_id] == 0:
                self._free.remove(block_id)
            self._ref_counts[block_id] += 1
        block_ids = hits + [self._take() for _ in range(num_needed - len(hits))]
        num_cached = len(hits) * self.block_size
        self.sequences[plan.sequence_id] = _Open(
            tokens, plan.namespace, block_ids, len(tokens), num_cached
        )
        result.opened.append(OpenedSequence(plan.sequence_id, list(block_ids), num_cached))
        return True

    def _take(self) -> int:
        block_id = self._free.popleft()
        self._ref_counts[block_id] = 1
        key = self._key_of.pop(block_id, None)
        if key is not None:
            del self._cached[key]
        return block_id


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
