"""Copies go with the next step, in their order, and are told of when it has run them."""

from __future__ import annotations

import pytest

from gateway.copies import CopyQueue
from gateway.limits import Limits
from gateway.ports import (
    BlockCopy,
    Chunk,
    ModelInfo,
    OpenedSequence,
    PoolInfo,
    SampledToken,
    StepResult,
    UpdateResult,
)
from gateway.scheduler import Scheduler
from gateway.types import GenerationRequest

FIRST, SECOND, THIRD = BlockCopy(1, 9), BlockCopy(9, 2), BlockCopy(3, 4)


def answer(copies=(), opened=(), transfer=0) -> UpdateResult:
    sequences = [OpenedSequence(f"s{n}", [], 0, each) for n, each in enumerate(opened)]
    return UpdateResult([], sequences, [], list(copies), transfer)


@pytest.fixture
def queue():
    return CopyQueue()


def test_an_answers_own_copies_come_before_those_of_its_sequences(queue):
    queue.add(answer([FIRST], opened=[[SECOND], [THIRD]]))
    assert queue.start_step() == [FIRST, SECOND, THIRD]
    assert queue.start_step() == []


def test_answers_that_no_step_followed_keep_their_order(queue):
    queue.add(answer([FIRST], transfer=5))
    queue.add(answer([SECOND], transfer=6))
    assert queue.start_step() == [FIRST, SECOND]
    queue.end_step(0.5)
    assert queue.take_done() == (6, 0.5)


def test_a_transfer_is_done_when_its_step_is_and_told_of_once(queue):
    queue.add(answer([FIRST], transfer=5))
    assert queue.take_done() == (0, 0.0)
    queue.start_step()
    queue.add(answer([SECOND], transfer=6))  # while that step runs
    assert queue.take_done() == (0, 0.0)
    queue.end_step(0.25)
    assert queue.take_done() == (5, 0.25)
    assert queue.take_done() == (0, 0.0)
    assert queue.start_step() == [SECOND]


def test_copies_that_are_no_transfer_need_not_be_told_of(queue):
    queue.add(answer(opened=[[FIRST]]))
    queue.start_step()
    queue.end_step(0.5)
    assert queue.take_done() == (0, 0.0)


@pytest.fixture
def scheduler():
    scheduler = Scheduler(Limits(), (), "owner")
    scheduler.attach(ModelInfo("m", b"f", 1000, 1000, PoolInfo(4, 64, 1)))
    return scheduler


def start(scheduler, prompt, cached, copies, result=None) -> str:
    """Open a sequence by hand; its id."""
    request = GenerationRequest(f"r{scheduler.num_waiting + scheduler.num_running}", list(prompt))
    scheduler.add(request, 100)
    [plan] = scheduler.plan_update().opens
    opened = OpenedSequence(plan.sequence_id, [0, 1, 2], cached, copies)
    scheduler.apply_update(result or UpdateResult([], [opened], [], [], 7))
    return plan.sequence_id


def test_the_step_that_first_computes_a_sequence_runs_its_copies(scheduler):
    sequence_id = start(scheduler, range(10), 6, [FIRST])
    step = scheduler.plan_step()
    assert step.copies == [FIRST]
    assert step.chunks == [Chunk(sequence_id, 6, 4, True)]
    assert scheduler.plan_update().completed_transfer == 0
    token = SampledToken(sequence_id, 1)
    scheduler.apply_result(StepResult(step.step_id, [token], 0.5, 0.125))
    update = scheduler.plan_update()
    assert (update.completed_transfer, update.copy_seconds) == (7, 0.125)
    assert scheduler.plan_step().copies == []


def test_only_steps_that_are_mostly_prefill_tell_what_it_costs(scheduler):
    sequence_id = start(scheduler, [1] * 90, 0, [])
    opened = OpenedSequence(sequence_id, list(range(23)), 0)
    scheduler._by_id[sequence_id].grow(0, opened.block_ids, 4)
    step = scheduler.plan_step()
    scheduler.apply_result(StepResult(step.step_id, [SampledToken(sequence_id, 1)], 0.5, 0.1))
    update = scheduler.plan_update()
    assert (update.num_prefill_tokens, update.prefill_seconds) == (90, 0.4)
    step = scheduler.plan_step()
    scheduler.apply_result(StepResult(step.step_id, [SampledToken(sequence_id, 1)], 0.1))
    assert scheduler.plan_update().num_prefill_tokens == 0


def test_lost_workers_take_their_copies_along(scheduler):
    start(scheduler, range(10), 6, [FIRST])
    scheduler.abandon(is_theirs=True)
    start(scheduler, range(10), 0, [])
    assert scheduler.plan_step().copies == []
    assert scheduler.plan_update().completed_transfer == 0
