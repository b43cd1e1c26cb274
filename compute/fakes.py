"""Stand-ins for compute's neighbours, for tests and benchmarks without services."""

from __future__ import annotations

import math
import mmap
import os
import random
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from compute.errors import PoolUnavailable
from compute.runner import StepRunner
from compute.types import (
    Chunk,
    KvShape,
    PoolHandle,
    PoolLayout,
    PosixMemory,
    SampledToken,
    SamplingOptions,
    SequenceState,
    Step,
)

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory is


class PrivatePool:
    """A PoolProvider that owns its pool itself. Close it, or use it as a context."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._handle: PoolHandle | None = None
        self._closed = False

    def attach_pool(self, shape: KvShape) -> PoolHandle:
        if self._closed:
            raise PoolUnavailable("the private pool was closed")
        if self._handle is None or self._handle.layout.shape != shape:
            self.replace(shape)
        assert self._handle is not None
        return self._handle

    def replace(self, shape: KvShape) -> None:
        """Make a new pool, of another generation and all zeros, in place of the present one."""
        self._unlink()
        layout = PoolLayout(shape, self.block_size, self.num_blocks)
        size = layout.pool_bytes
        generation = secrets.randbits(63)
        name = f"quire-private-{os.getpid()}-{generation:x}"
        with (_SHARED_MEMORY / name).open("xb") as file:
            file.truncate(math.ceil(size / mmap.PAGESIZE) * mmap.PAGESIZE)
        self._handle = PoolHandle(PosixMemory(name), 0, size, layout, generation)

    def close(self) -> None:
        self._unlink()
        self._closed = True

    def __enter__(self) -> PrivatePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _unlink(self) -> None:
        if self._handle is not None:
            assert isinstance(self._handle.memory, PosixMemory)
            (_SHARED_MEMORY / self._handle.memory.name).unlink(missing_ok=True)
            self._handle = None


@dataclass(slots=True)
class Generated:
    """What SimpleDriver made of one prompt."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)


@dataclass(slots=True)
class _Running:
    prompt: Sequence[int]
    block_ids: list[int]
    num_computed: int
    generated: Generated

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.generated.token_ids)


class SimpleDriver:
    """Generates for many prompts at once: decodes first, then chunks, in a token budget.

    Blocks are handed out in random order and, if `share_prefixes`, full blocks of prompts
    are reused by later calls whose prompts start the same way. It never evicts.
    """

    def __init__(
        self,
        runner: StepRunner,
        *,
        token_budget: int = 512,
        share_prefixes: bool = False,
        shuffle_seed: int = 0,
    ) -> None:
        layout = runner.handle().layout
        self._runner = runner
        self._block_size = layout.block_size
        self._budget = token_budget
        self._share = share_prefixes
        free = list(range(layout.num_blocks))
        random.Random(shuffle_seed).shuffle(free)  # noqa: S311 - not a secret
        self._free = deque(free)
        self._prefixes: dict[tuple[int, ...], int] = {}
        self._num_calls = 0
        self._num_steps = 0
        self.num_cached_tokens = 0  # prompt tokens of all calls that were not computed

    def generate(
        self,
        prompts: Mapping[str, Sequence[int]],
        num_tokens: int,
        sampling: Mapping[str, SamplingOptions] | None = None,
    ) -> dict[str, Generated]:
        """Exactly `num_tokens` for each prompt; there is no end of sequence here."""
        self._num_calls += 1
        options = sampling or {}
        running = {name: self._open(prompt, num_tokens) for name, prompt in prompts.items()}
        states = [
            SequenceState(
                self._sequence_id(name),
                sequence.prompt,
                sequence.block_ids,
                options.get(name, SamplingOptions()),
            )
            for name, sequence in running.items()
        ]
        pending = dict(running)
        while pending:
            self._step(pending, states)
            states = []
            pending = {
                name: sequence
                for name, sequence in pending.items()
                if len(sequence.generated.token_ids) < num_tokens
            }
        self._finish(running)
        return {name: sequence.generated for name, sequence in running.items()}

    def _sequence_id(self, name: str) -> str:
        return f"{self._num_calls}/{name}"

    def _open(self, prompt: Sequence[int], num_tokens: int) -> _Running:
        needed = math.ceil((len(prompt) + num_tokens) / self._block_size)
        block_ids: list[int] = []
        # At least one token is left to compute, since its logits are needed.
        for end in range(self._block_size, len(prompt), self._block_size):
            block_id = self._prefixes.get(tuple(prompt[:end]))
            if block_id is None:
                break
            block_ids.append(block_id)
        num_cached = len(block_ids) * self._block_size
        self.num_cached_tokens += num_cached
        block_ids += [self._free.popleft() for _ in range(needed - len(block_ids))]
        return _Running(prompt, block_ids, num_cached, Generated())

    def _step(self, pending: Mapping[str, _Running], states: Sequence[SequenceState]) -> None:
        budget = self._budget
        chunks = []
        by_need = sorted(pending.items(), key=lambda item: not item[1].generated.token_ids)
        for name, sequence in by_need:
            size = min(budget, sequence.num_tokens - sequence.num_computed)
            if size:
                end = sequence.num_computed + size
                samples = end == sequence.num_tokens
                start = sequence.num_computed
                chunks.append(Chunk(self._sequence_id(name), start, size, samples))
                sequence.num_computed = end
                budget -= size
        self._num_steps += 1
        result = self._runner.run(Step(self._num_steps, sequences=states, chunks=chunks))
        self._append(result.tokens, pending)

    def _append(self, tokens: Sequence[SampledToken], pending: Mapping[str, _Running]) -> None:
        for token in tokens:
            generated = pending[token.sequence_id.partition("/")[2]].generated
            generated.token_ids.append(token.token_id)
            generated.logprobs.append(token.logprob)

    def _finish(self, running: Mapping[str, _Running]) -> None:
        for sequence in running.values():
            num_full = len(sequence.prompt) // self._block_size if self._share else 0
            for index in range(num_full):
                key = tuple(sequence.prompt[: (index + 1) * self._block_size])
                self._prefixes.setdefault(key, sequence.block_ids[index])
            keep = set(self._prefixes.values())
            self._free.extend(block for block in sequence.block_ids if block not in keep)
        closed = [self._sequence_id(name) for name in running]
        self._runner.run(Step(0, closed=closed))
