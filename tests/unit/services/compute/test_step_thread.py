"""The thread that runs steps: order, one driver, what is dropped and what is not."""

from __future__ import annotations

import asyncio
import threading

import pytest

from compute.errors import DriverBusy, PoolUnavailable
from compute.types import Step, StepResult
from services.compute.step_thread import StepThread, new_executor


class Runner:
    """Notes what is asked of it. Holds a step while `gate` is closed."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.gate = threading.Event()
        self.gate.set()
        self.running = threading.Event()
        self.refresh_error: Exception | None = None

    def refresh_pool(self) -> None:
        self.calls.append("refresh")
        if self.refresh_error is not None:
            raise self.refresh_error

    def reset(self) -> None:
        self.calls.append("reset")

    def run(self, step: Step) -> StepResult:
        self.calls.append(step.step_id)
        self.running.set()
        self.gate.wait(30)
        return StepResult(step.step_id)


@pytest.fixture
def runner():
    return Runner()


@pytest.fixture
async def thread(runner):
    thread = StepThread(runner, new_executor())
    yield thread
    runner.gate.set()
    await asyncio.to_thread(thread.close)


async def test_leaving_drops_the_queued_steps_and_resets_after_the_running_one(thread, runner):
    session = await thread.open()
    runner.gate.clear()
    steps = [session.submit(Step(number)) for number in (1, 2, 3)]
    await asyncio.to_thread(runner.running.wait)
    session.close()
    session.close()
    assert [step.cancelled() for step in steps] == [True, True, True]
    opening = asyncio.create_task(thread.open())  # the seat is free at once
    runner.gate.set()
    follower = await opening
    await follower.submit(Step(4))
    assert runner.calls == ["refresh", 1, "reset", "refresh", 4]


async def test_a_second_driver_is_refused_and_the_first_goes_on(thread, runner):
    session = await thread.open()
    with pytest.raises(DriverBusy):
        await thread.open()
    assert (await session.submit(Step(1))).step_id == 1
    assert runner.calls == ["refresh", 1]


async def test_two_that_open_at_once_are_one_driver(thread):
    results = await asyncio.gather(thread.open(), thread.open(), return_exceptions=True)
    assert [type(result).__name__ for result in results] == ["StepSession", "DriverBusy"]


@pytest.mark.parametrize("cancel", [False, True])
async def test_an_opening_that_fails_leaves_the_seat_free(thread, runner, cancel):
    if cancel:
        opening = asyncio.create_task(thread.open())
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
    else:
        runner.refresh_error = PoolUnavailable("away")
        with pytest.raises(PoolUnavailable):
            await thread.open()
        runner.refresh_error = None
    session = await thread.open()
    assert (await session.submit(Step(1))).step_id == 1


async def test_a_session_that_is_over_takes_no_steps(thread, runner):
    session = await thread.open()
    session.close()
    with pytest.raises(RuntimeError):
        session.submit(Step(1))
    follower = await thread.open()
    session.close()  # too late to end another's turn
    assert (await follower.submit(Step(2))).step_id == 2
    assert 1 not in runner.calls


async def test_closing_the_thread_waits_for_the_running_step_only(thread, runner):
    session = await thread.open()
    runner.gate.clear()
    running, queued = session.submit(Step(1)), session.submit(Step(2))
    await asyncio.to_thread(runner.running.wait)
    closing = asyncio.create_task(asyncio.to_thread(thread.close))
    await asyncio.sleep(0.01)
    assert not closing.done()
    runner.gate.set()
    await closing
    assert (await running).step_id == 1
    await asyncio.wait({queued})
    assert queued.cancelled()
    session.close()
    assert runner.calls == ["refresh", 1]
