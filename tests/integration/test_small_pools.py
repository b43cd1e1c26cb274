"""More load than memory: everything ends, with the right answer, and the counters say how."""

from __future__ import annotations

import asyncio
import math

import pytest

from gateway.ports import SamplingOptions
from gateway.types import BeamOptions, FinishReason, GenerationRequest
from tests.integration.local import BLOCK_SIZE, answer, answers, make_tiny, prompts, started


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    make_tiny(directory)
    return directory


def _request(name, prompt, num_tokens, **options):
    sampling = SamplingOptions(temperature=1.0, seed=len(name) + sum(prompt), return_logprob=True)
    return GenerationRequest(
        name, prompt, num_tokens, options.pop("sampling", sampling), ignore_eos=True, **options
    )


@pytest.mark.parametrize("num_host_blocks", [0, 60, 1000])
async def test_a_pool_ten_times_too_small_for_the_load_is_enough(tiny, num_host_blocks):
    load = []
    for n, prompt in enumerate(prompts(40, 40, shared=16)):
        kind = [{}, {}, {"n": 2}, {"beams": BeamOptions(2), "n": 2}][n % 4]
        if "beams" in kind:
            kind["sampling"] = SamplingOptions()
        load.append(_request(f"r{n}", prompt, 30 + n % 20, priority=n % 3 - 1, **kind))
    needed = sum(
        request.num_sequences * math.ceil((40 + request.max_tokens) / BLOCK_SIZE)
        for request in load
    )
    async with started(tiny, num_blocks=needed, max_running=64) as quire:
        expected = [got.what_counts() for got in await answers(quire, load)]
        assert quire.engine.stats().preemptions.num_groups == 0
    small = {"num_blocks": needed // 10, "num_host_blocks": num_host_blocks}
    async with started(tiny, max_running=64, **small) as quire:
        got = [each.what_counts() for each in await answers(quire, load)]
        stats, pool = quire.engine.stats(), quire.manager.stats()
    assert got == expected
    preempted = stats.preemptions
    assert preempted.num_groups > 0
    assert preempted.num_swapped + preempted.num_recomputed == preempted.num_resumed
    assert bool(preempted.num_swapped) == bool(num_host_blocks)
    assert preempted.num_recomputed > 0 or num_host_blocks
    assert (stats.num_running, stats.num_waiting, stats.num_table_blocks) == (0, 0, 0)
    assert pool.num_held == 0
    assert pool.num_suspended == 0


@pytest.mark.timeout(300)
async def test_c11_fifty_samples_without_a_host_pool_all_end(tiny):
    first, second = prompts(2, 24)
    load = [_request("first", first, 600, n=50), _request("second", second, 600, n=50)]
    alone = 3 + 50 * math.ceil((24 + 600 - 3 * BLOCK_SIZE) / BLOCK_SIZE)
    settings = {"num_blocks": alone + 100, "max_running": 128, "token_budget": 512}
    async with started(tiny, **settings) as quire:
        got = await answers(quire, load)
        preempted = quire.engine.stats().preemptions
    for each in got:
        assert [len(tokens) for tokens in each.tokens()] == [600] * 50
        assert {end.reason for end in each.ends.values()} == {FinishReason.LENGTH}
    assert preempted.num_recomputed >= 50
    assert preempted.num_resumed == preempted.num_recomputed
    assert preempted.num_groups <= 4


async def _most_held(quire, load) -> int:
    """Blocks that were held at once while `load` was answered."""
    most, update = 0, quire.manager.update

    def watched(*args):
        nonlocal most
        result = update(*args)
        most = max(most, quire.manager.stats().num_held)
        return result

    quire.manager.update = watched
    await answers(quire, load)
    quire.manager.update = update
    assert most
    return most


async def test_four_samples_hold_their_prompt_once(tiny):
    [prompt] = prompts(1, 203)
    num_tokens = 40
    shared, whole = 203 // BLOCK_SIZE, math.ceil((203 + num_tokens) / BLOCK_SIZE)
    async with started(tiny) as quire:
        together = await _most_held(quire, [_request("x", prompt, num_tokens, n=4)])
        apart = await _most_held(
            quire, [_request(f"x{n}", prompt, num_tokens, salt=str(n)) for n in range(4)]
        )
    # The KV of the last token is never written; guesses are off.
    assert apart >= 4 * (whole - 1)
    assert together <= shared + 4 * (whole - shared)
    assert together < 0.45 * apart


async def test_four_beams_hold_what_they_have_in_common_once(tiny):
    [prompt] = prompts(1, 203)
    num_tokens = 40
    whole = math.ceil((203 + num_tokens) / BLOCK_SIZE)
    request = _request("x", prompt, num_tokens, sampling=SamplingOptions(), beams=BeamOptions(4))
    async with started(tiny) as quire:
        together = await _most_held(quire, [request])
    assert together < 0.45 * 4 * whole


async def test_s4_leaving_in_the_middle_of_swaps_leaves_nothing(tiny):
    """A hundred times, at any moment; the pool is as it was."""
    asked = prompts(12, 40)
    async with started(tiny, num_blocks=60, num_host_blocks=200) as quire:
        # Computing again is dear, whatever this machine measures: all are swapped.
        quire.manager.observe_prefill(1, 10.0)
        quire.manager.observe_prefill = lambda *_measured: None
        num_cancelled = 0
        for turn in range(10):
            load = [
                asyncio.create_task(answer(quire.engine, _request(f"t{turn}-{n}", prompt, 60)))
                for n, prompt in enumerate(asked)
            ]
            seen = quire.engine.stats().preemptions
            for task in load[2:]:
                # Right after something was suspended or came back, while the copies run.
                while not task.done() and quire.engine.stats().preemptions == seen:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                seen = quire.engine.stats().preemptions
                task.cancel()
            got = await asyncio.gather(*load, return_exceptions=True)
            num_cancelled += sum(isinstance(each, asyncio.CancelledError) for each in got)
            assert [len(each.tokens()[0]) for each in got[:2]] == [60, 60]
        async with asyncio.timeout(30):
            while quire.engine.stats().num_table_blocks:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            while quire.manager.stats().num_held:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert num_cancelled > 50
        assert quire.engine.stats().preemptions.num_swapped > 20
        assert quire.engine.stats().preemptions.num_recomputed == 0
        assert quire.manager.stats().num_suspended == 0
