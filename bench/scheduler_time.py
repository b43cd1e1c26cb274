"""What the scheduler itself takes for a step of decodes, by the number of sequences.

The workers' answers are made up outside the measured time: every extension is granted,
every sequence gets a token.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

from gateway.limits import Limits
from gateway.ports import (
    ExtendedSequence,
    ModelInfo,
    OpenedSequence,
    PoolInfo,
    SampledToken,
    Step,
    StepResult,
    Update,
    UpdateResult,
)
from gateway.scheduler import Scheduler
from gateway.types import GenerationRequest

_BLOCK_SIZE = 16
_PROMPT = 64
_LENGTH = 8192
R = TypeVar("R")


def measure(num_sequences: int, num_steps: int = 400) -> dict[str, Any]:
    """Median microseconds of each of the scheduler's four calls, and of all together."""
    limits = Limits(token_budget=16 * _PROMPT, max_running=num_sequences, max_waiting=num_sequences)
    if limits.token_budget < num_sequences:
        raise ValueError("more sequences than a step has tokens")
    scheduler = Scheduler(limits, (), "bench")
    pool = PoolInfo(_BLOCK_SIZE, 1_000_000, 1)
    scheduler.attach(ModelInfo("m", b"f", 50_000, _LENGTH, pool))
    for number in range(num_sequences):
        prompt = list(range(_PROMPT))
        scheduler.add(GenerationRequest(f"r{number}", prompt, _LENGTH), _LENGTH)
    times: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], R]) -> R:
        began = time.perf_counter()
        result = call()
        times.setdefault(name, []).append(time.perf_counter() - began)
        return result

    while True:
        step = timed("plan_step", scheduler.plan_step)
        update = timed("plan_update", scheduler.plan_update)
        changes = _answer(update)
        timed("apply_update", lambda c=changes: scheduler.apply_update(c))  # type: ignore[misc]
        if step is None:
            continue
        result = _result(step)
        timed("apply_result", lambda r=result: scheduler.apply_result(r))  # type: ignore[misc]
        is_steady = len(step.chunks) == num_sequences and len(result.tokens) == num_sequences
        if not is_steady or any(chunk.num_tokens > 1 for chunk in step.chunks):
            times.clear()
        elif len(times["plan_step"]) >= num_steps:
            break
    medians = {name: 1e6 * statistics.median(values) for name, values in times.items()}
    # Before a step can go out: its plan, and the results of the one before.
    in_the_way = medians["plan_step"] + medians["apply_result"]
    return {"sequences": num_sequences, **medians, "in_the_way": in_the_way}


def _answer(update: Update) -> UpdateResult:
    result = UpdateResult([], [], [], num_available_blocks=1000)
    for opened in update.opens:
        blocks = list(range(_PROMPT // _BLOCK_SIZE))
        result.opened.append(OpenedSequence(opened.sequence_id, blocks, 0))
    for plan in update.extends:
        num_blocks = -(-plan.length // _BLOCK_SIZE)
        if plan.length % _BLOCK_SIZE == 1:  # a new block begins
            result.extended.append(ExtendedSequence(plan.sequence_id, num_blocks - 1, [num_blocks]))
    return result


def _result(step: Step) -> StepResult:
    tokens = [SampledToken(chunk.sequence_id, 7) for chunk in step.chunks if chunk.sample]
    return StepResult(step.step_id, tokens, 0.01)
