from __future__ import annotations

import asyncio

import pytest

from gateway import engine
from gateway.errors import GatewayError, StepRefused, WorkerUnavailable
from gateway.limits import Limits
from gateway.types import Delta, Finished, FinishReason, Started


async def test_before_the_workers_are_there_requests_are_told_to_come_back(new_bench):
    bench = new_bench(is_down=True)
    await bench.engine.start()
    await bench.until(lambda: "down" in bench.engine._obstacle)
    with pytest.raises(WorkerUnavailable, match="not ready: the fake"):  # and why
        await bench.events("x")
    with pytest.raises(WorkerUnavailable, match="not ready: the fake"):
        _ = bench.engine.model
    assert not bench.engine.is_ready()
    bench.compute.is_down = False
    await bench.until(bench.engine.is_ready)
    assert len(await bench.events("x")) > 2


def delivered(events) -> list[int]:
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


@pytest.mark.parametrize("worker", ["kv", "compute"])
async def test_requests_go_on_when_a_lost_worker_is_back(new_bench, worker):
    bench = new_bench(delay=0.002)
    await bench.start()
    expected = delivered(await bench.events("hello", max_tokens=100))
    begun = [bench.begin("hello", request_id=f"r{i}", max_tokens=100) for i in range(3)]
    await bench.until(lambda: all(len(seen) > 3 for seen, _ in begun))
    getattr(bench, worker).is_down = True
    await bench.until(lambda: not bench.engine.is_ready())
    with pytest.raises(WorkerUnavailable):
        await bench.events("x")
    assert not any(task.done() for _, task in begun)
    getattr(bench, worker).is_down = False
    await asyncio.gather(*(task for _, task in begun))
    for seen, _ in begun:
        assert delivered(seen) == expected
        assert seen[-1] == Finished(FinishReason.LENGTH, 100)
        assert sum(isinstance(event, Started) for event in seen) == 1
    await bench.until_empty()
    assert bench.kv.num_free == bench.kv.num_blocks
    assert bench.engine.stats().counters.num_reconnects == 1


async def test_a_token_that_was_lost_on_its_way_is_drawn_again(new_bench):
    bench = new_bench(dies_at_step=5)
    await bench.start()
    seen, task = bench.begin("hello", max_tokens=100)
    await bench.until(lambda: bench.compute.is_down and not bench.engine.is_ready())
    bench.compute.dies_at_step, bench.compute.is_down = None, False
    await task
    assert len(delivered(seen)) == 100
    assert bench.engine.stats().counters.num_reconnects == 1


async def test_running_and_waiting_requests_survive_a_lost_worker_in_their_order(new_bench):
    bench = new_bench(delay=0.002, limits=Limits(max_running=1))
    await bench.start()
    running, task = bench.begin("hello", max_tokens=100)
    waiting, other = bench.begin("later", request_id="w")
    await bench.until(lambda: len(running) > 3)
    bench.compute.is_down = True
    await bench.until(lambda: not bench.engine.is_ready())
    assert bench.engine.stats().num_waiting == 2
    bench.compute.is_down = False
    await task
    assert not waiting
    await other
    assert waiting[-1] == Finished(FinishReason.LENGTH, 8)


async def test_waiting_requests_are_not_kept_for_ever(new_bench):
    bench = new_bench(delay=0.002, limits=Limits(max_running=1))
    bench.set(queue_timeout=0.05)
    await bench.start()
    running, task = bench.begin("hello", max_tokens=100)
    _, other = bench.begin("later", request_id="w")
    await bench.until(lambda: len(running) > 3)
    bench.compute.is_down = True
    outcomes = await asyncio.gather(task, other, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [WorkerUnavailable] * 2
    assert bench.engine.stats().num_waiting == 0


async def test_a_step_that_never_ends_counts_as_a_dead_worker(new_bench):
    bench = new_bench(hangs=True)
    bench.set(step_timeout=0.05)
    await bench.start()
    _, task = bench.begin("hello")
    with pytest.raises(WorkerUnavailable, match="overdue"):
        await task
    bench.compute.hangs = False
    await bench.until(bench.engine.is_ready)
    assert len(await bench.events("hello")) > 2
    await bench.until_empty()


async def test_a_refused_step_ends_its_requests_and_not_the_engine(new_bench):
    bench = new_bench(refuses_step=3)
    await bench.start()
    _, task = bench.begin("hello", max_tokens=100)
    with pytest.raises(StepRefused):
        await task
    await bench.until(bench.engine.is_ready)
    assert len(await bench.events("hello")) > 2
    await bench.until_empty()


async def test_a_bug_in_the_driver_ends_requests_with_an_error_and_not_the_engine(new_bench):
    bench = new_bench()
    await bench.start()
    bench.compute.script = lambda known: 1 // 0
    _, task = bench.begin("hello")
    with pytest.raises(GatewayError) as caught:
        await task
    assert type(caught.value) is GatewayError
    bench.compute.script = None
    await bench.until(bench.engine.is_ready)
    assert len(await bench.events("hello")) > 2


async def test_a_kvstore_that_restarts_while_idle_costs_no_request(new_bench):
    bench = new_bench()
    await bench.start()
    await bench.events("hello")
    await bench.until_empty()
    bench.kv.restart()
    bench.compute.slots.clear()
    assert (await bench.events("hello"))[-1] == Finished(FinishReason.LENGTH, 8)


async def test_a_kvstore_that_restarts_under_load_costs_no_request(new_bench):
    bench = new_bench(delay=0.002)
    await bench.start()
    seen, task = bench.begin("hello", max_tokens=200)
    await bench.until(lambda: len(seen) > 3)
    bench.kv.restart()
    await task
    assert len(delivered(seen)) == 200


@pytest.mark.parametrize("worker", ["kv", "compute"])
async def test_readiness_falls_when_a_worker_goes_while_idle(new_bench, worker):
    bench = new_bench()
    await bench.start()
    getattr(bench, worker).is_down = True
    await bench.until(lambda: not bench.engine.is_ready())
    getattr(bench, worker).is_down = False
    await bench.until(bench.engine.is_ready)


async def test_a_replaced_model_is_announced_and_queued_requests_for_the_old_one_end(new_bench):
    bench = new_bench(delay=0.002, limits=Limits(max_running=1))
    await bench.start()
    running, task = bench.begin("hello", max_tokens=100)
    _, other = bench.begin("later", request_id="w")
    await bench.until(lambda: len(running) > 3)
    bench.compute.is_down = True
    await bench.until(lambda: not bench.engine.is_ready())
    bench.compute.max_sequence_length = 32
    bench.compute.is_down = False
    for lost in (task, other):
        with pytest.raises(WorkerUnavailable, match="replaced"):
            await lost
    assert bench.engine.model.max_sequence_length == 32
    assert len(await bench.events("hello")) > 2


async def test_a_pool_held_by_others_delays_a_request_until_there_is_room(new_bench):
    bench = new_bench(num_blocks=4)
    await bench.start()
    held = list(bench.kv._free)
    bench.kv._free.clear()
    seen, task = bench.begin("hello")
    await bench.until(lambda: [u for u in bench.kv.updates if u.opens])
    assert not seen
    assert bench.engine.is_ready()
    bench.kv._free.extend(held)
    await task
    assert seen[-1] == Finished(FinishReason.LENGTH, 8)


async def test_a_pool_that_others_hold_ends_readiness_and_in_time_the_wait(new_bench, monkeypatch):
    """Ready means that steps make progress, and a queue that cannot move is no progress."""
    monkeypatch.setattr(engine, "_BLOCKED_GRACE", 0.05)
    bench = new_bench()
    bench.set(queue_timeout=0.4)
    await bench.start()
    held = list(bench.kv._free)
    bench.kv._free.clear()
    _, task = bench.begin("hello")
    await bench.until(lambda: not bench.engine.is_ready())
    assert not task.done()
    with pytest.raises(WorkerUnavailable, match="page pool is full"):
        await task
    bench.kv._free.extend(held)
    await bench.until(bench.engine.is_ready)
    assert (await bench.events("hello"))[-1] == Finished(FinishReason.LENGTH, 8)


async def test_a_pool_smaller_than_the_model_is_a_warning(new_bench, caplog):
    await new_bench(num_blocks=4).start()
    assert "longer requests are refused" in caplog.text
