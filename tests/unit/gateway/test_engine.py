from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from gateway.errors import (
    InvalidField,
    QueueFull,
    RequestExists,
    RequestNotFound,
    WorkerUnavailable,
)
from gateway.fakes import expected_tokens
from gateway.limits import Limits
from gateway.ports import SamplingOptions
from gateway.types import Delta, Finished, FinishReason, GenerationRequest, Started


async def test_events_are_one_start_then_deltas_then_one_end(new_bench):
    bench = new_bench()
    await bench.start()
    events = await bench.events("hello", max_tokens=6)
    assert events[0] == Started("r", 5, 0)
    assert all(isinstance(event, Delta) for event in events[1:-1])
    assert events[-1] == Finished(FinishReason.LENGTH, 6)
    ids = [token_id for event in events[1:-1] for token_id in event.token_ids]
    assert ids == expected_tokens(b"hello", 6, SamplingOptions(), 256)


async def test_a_second_equal_prompt_reports_what_was_cached(new_bench):
    bench = new_bench()
    await bench.start()
    await bench.events("twelve bytes")
    events = await bench.events("twelve bytes")
    assert events[0] == Started("r", 12, 8)
    assert bench.engine.stats().counters.num_cached_tokens == 8


async def test_the_end_token_counts_but_has_no_text(new_bench, saying):
    bench = new_bench(vocab_size=258, script=saying("ask", "yes"))
    await bench.start()
    events = await bench.events("ask", max_tokens=20)
    assert "".join(e.text for e in events if isinstance(e, Delta)) == "yes"
    assert events[-1] == Finished(FinishReason.STOP, 4)


async def test_a_character_of_several_tokens_is_delivered_whole(new_bench, saying):
    bench = new_bench(vocab_size=258, script=saying("ask", "😊 é"))
    await bench.start()
    events = await bench.events("ask", max_tokens=20)
    texts = [event.text for event in events if isinstance(event, Delta) and event.text]
    assert texts == ["😊", " ", "é"]


async def test_a_character_cut_off_by_the_limit_is_flushed_once(new_bench, saying):
    bench = new_bench(vocab_size=258, script=saying("ask", "a😊"))
    await bench.start()
    assert await bench.text("ask", max_tokens=3) == ("a\ufffd", FinishReason.LENGTH)


async def test_a_stop_string_ends_the_answer_and_frees_the_blocks(new_bench, saying):
    bench = new_bench(vocab_size=258, script=saying("ask", "one two three" * 10))
    await bench.start()
    assert await bench.text("ask", max_tokens=100, stop=("two",)) == ("one ", FinishReason.STOP)
    num_steps = len(bench.compute.steps)
    await bench.until_empty()
    assert len(bench.compute.steps) <= num_steps + 1


async def test_text_held_back_for_a_stop_string_comes_with_the_end(new_bench, saying):
    bench = new_bench(vocab_size=258, script=saying("ask", "on tw"))
    await bench.start()
    assert await bench.text("ask", max_tokens=20, stop=("two",)) == ("on tw", FinishReason.STOP)


async def test_log_probabilities_come_if_asked_for(new_bench):
    bench = new_bench()
    await bench.start()
    events = await bench.events("x", max_tokens=3, sampling=SamplingOptions(return_logprob=True))
    assert [p.logprob for e in events if isinstance(e, Delta) for p in e.logprobs] == [-0.5] * 3
    events = await bench.events("x", max_tokens=3)
    assert [p.logprob for e in events if isinstance(e, Delta) for p in e.logprobs] == []


async def test_without_max_tokens_the_models_length_is_the_limit(new_bench):
    bench = new_bench(max_sequence_length=20)
    await bench.start()
    events = await bench.events("hello", max_tokens=None)
    assert events[-1] == Finished(FinishReason.LENGTH, 15)


async def test_many_requests_at_once_in_a_tiny_pool_all_get_their_own_answers(new_bench):
    bench = new_bench(num_blocks=12)
    await bench.start()

    async def ask(index):
        options = {"request_id": f"r{index}", "sampling": SamplingOptions(seed=index)}
        return await bench.events([index] * 8, max_tokens=20, **options)

    answers = await asyncio.gather(*(ask(index) for index in range(10)))
    for index, events in enumerate(answers):
        ids = [token_id for e in events if isinstance(e, Delta) for token_id in e.token_ids]
        assert ids == expected_tokens([index] * 8, 20, SamplingOptions(seed=index), 256)
        assert sum(isinstance(event, Started) for event in events) == 1
    assert bench.engine.stats().preemptions.num_groups > 0
    await bench.until_empty()


async def test_cancel_ends_a_running_request_and_frees_its_blocks(new_bench):
    bench = new_bench(delay=0.002)
    await bench.start()
    seen, task = bench.begin("hello", max_tokens=200)
    await bench.until(lambda: len(seen) > 3)
    bench.engine.cancel("r")
    await task
    assert seen[-1].reason is FinishReason.CANCELLED
    assert seen[-1].num_completion_tokens < 200
    await bench.until_empty()
    with pytest.raises(RequestNotFound):
        bench.engine.cancel("r")


async def test_cancel_reaches_a_request_that_waits(new_bench):
    bench = new_bench(delay=0.002, limits=Limits(max_running=1))
    await bench.start()
    first, task = bench.begin("hello", max_tokens=30)
    waiting, other = bench.begin("x", request_id="w")
    await bench.until(lambda: bench.engine.stats().num_waiting == 1 and len(first) > 1)
    bench.engine.cancel("w")
    await other
    assert waiting == [Finished(FinishReason.CANCELLED, 0)]
    await task
    assert first[-1] == Finished(FinishReason.LENGTH, 30)


async def test_closing_the_iterator_frees_the_blocks_within_two_steps(new_bench):
    bench = new_bench(delay=0.002, max_sequence_length=5000, num_blocks=1300)
    await bench.start()
    request = GenerationRequest("r", [1, 2, 3], max_tokens=4096)
    async with aclosing(bench.engine.generate(request)) as events:
        async for event in events:
            if isinstance(event, Delta):
                break
    num_steps = len(bench.compute.steps)
    await bench.until_empty()
    assert len(bench.compute.steps) <= num_steps + 2
    assert len(await bench.events("again")) > 2


async def test_a_reader_that_is_cancelled_leaves_nothing(new_bench):
    bench = new_bench(delay=0.002)
    await bench.start()
    seen, task = bench.begin("hello", max_tokens=200)
    await bench.until(lambda: seen)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await bench.until_empty()


async def test_a_full_queue_refuses_the_next_and_serves_those_in_it(new_bench):
    bench = new_bench(delay=0.002, limits=Limits(max_running=1, max_waiting=1))
    await bench.start()
    begun = [bench.begin("a", request_id="r0", max_tokens=20)]
    await bench.until(lambda: begun[0][0])
    begun.append(bench.begin("b", request_id="r1"))
    await bench.until(lambda: bench.engine.stats().num_waiting == 1)
    with pytest.raises(QueueFull):
        await bench.events("c", request_id="r2")
    await asyncio.gather(*(task for _, task in begun))
    assert [seen[-1].num_completion_tokens for seen, _ in begun] == [20, 8]
    assert len(await bench.events("c", request_id="r2")) > 2


async def test_an_id_in_use_is_refused_and_its_owner_undisturbed(new_bench):
    bench = new_bench(delay=0.002)
    await bench.start()
    seen, task = bench.begin("hello", max_tokens=20)
    await bench.until(lambda: seen)
    with pytest.raises(RequestExists):
        await bench.events("other")
    await task
    assert seen[-1] == Finished(FinishReason.LENGTH, 20)


async def test_a_bad_request_is_refused_before_anything_happens(new_bench):
    bench = new_bench()
    await bench.start()
    num_updates = len(bench.kv.updates)
    with pytest.raises(InvalidField):
        await bench.events([])
    with pytest.raises(InvalidField):
        await bench.events("x", max_tokens=10**9)
    assert not bench.compute.steps
    assert not [u for u in bench.kv.updates[num_updates:] if u.opens]
    assert len(await bench.events("x")) > 2


async def test_tenants_do_not_share_prefixes(new_bench):
    bench = new_bench()
    await bench.start()
    await bench.events("twelve bytes", tenant="a")
    events = await bench.events("twelve bytes", tenant="b")
    assert events[0].num_cached_tokens == 0
    events = await bench.events("twelve bytes", tenant="a")
    assert events[0].num_cached_tokens == 8


async def test_idle_means_no_steps_and_no_updates_but_probes(new_bench):
    bench = new_bench()
    await bench.start()
    await bench.events("x")
    await bench.until_empty()
    seen = len(bench.kv.updates)
    await bench.until(lambda: len(bench.kv.updates) >= seen + 3)
    for update in bench.kv.updates[seen:]:
        assert [*update.commits, *update.extends, *update.opens] == []
    assert len(bench.compute.steps) == 8


async def test_stop_lets_running_requests_finish_and_refuses_new_ones(new_bench):
    bench = new_bench(delay=0.002)
    bench.set(drain_timeout=10.0)
    await bench.start()
    seen, task = bench.begin("hello", max_tokens=20)
    await bench.until(lambda: seen)
    stopping = asyncio.create_task(bench.engine.stop())
    await asyncio.sleep(0)
    assert not bench.engine.is_ready()
    with pytest.raises(WorkerUnavailable, match="shutting down"):
        await bench.events("x", request_id="late")
    await asyncio.gather(task, stopping)
    assert seen[-1] == Finished(FinishReason.LENGTH, 20)
    assert not bench.kv.sequences


async def test_stop_ends_what_takes_too_long_and_closes_it(new_bench):
    bench = new_bench(delay=0.05)
    bench.set(drain_timeout=0.1)
    await bench.start()
    seen, task = bench.begin("hello", max_tokens=200)
    await bench.until(lambda: seen)
    await bench.engine.stop()
    with pytest.raises(WorkerUnavailable):
        await task
    assert not bench.kv.sequences
    assert bench.compute.stream is None
