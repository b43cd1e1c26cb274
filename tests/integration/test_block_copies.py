"""Answers are the same whether KV was computed, copied within the pool, or came from the host.

The real model, with a page pool that holds only a part of what the prompts need.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from gateway.types import Delta, GenerationRequest, Started
from services.common import config
from services.local import LocalQuire

pytestmark = pytest.mark.timeout(600)

BLOCK_SIZE = 16
NUM_TOKENS = 12
# Of whole blocks and a rest each, and none like another from the first token on.
PROMPTS = [[1000 + 37 * n + i * (n + 3) for i in range(60 + 7 * n)] for n in range(6)]


@dataclass
class Answer:
    token_ids: list[int]
    num_cached_tokens: int


async def ask(quire: LocalQuire, prompt: list[int], name: str) -> Answer:
    request = GenerationRequest(name, prompt, NUM_TOKENS, ignore_eos=True)
    answer = Answer([], 0)
    async for event in quire.engine.generate(request):
        if isinstance(event, Started):
            answer.num_cached_tokens = event.num_cached_tokens
        elif isinstance(event, Delta):
            answer.token_ids += event.token_ids
    return answer


async def running(num_blocks: int, num_host_blocks: int, **options) -> LocalQuire:
    settings = config.load(config.WorkerSettings, "test", [])
    block_bytes = BLOCK_SIZE * 30 * 2 * 3 * 64 * 4  # of the default model in float32
    quire = LocalQuire(
        settings,
        kv_memory_bytes=num_blocks * block_bytes,
        block_size=BLOCK_SIZE,
        host_memory_bytes=num_host_blocks * block_bytes,
        **options,
    )
    await quire.start()
    async with asyncio.timeout(60):
        while not quire.engine.is_ready():  # noqa: ASYNC110 - it has no event for that
            await asyncio.sleep(0.05)
    return quire


async def rounds(quire: LocalQuire, prompts, num_rounds: int) -> list[list[Answer]]:
    try:
        return [
            [await ask(quire, prompt, f"{n}-{i}") for i, prompt in enumerate(prompts)]
            for n in range(num_rounds)
        ]
    finally:
        await quire.engine.stop()


async def finish(quire: LocalQuire) -> None:
    assert quire.manager.audit() == []
    await quire.stop()


async def test_what_the_page_pool_has_no_room_for_comes_back_from_the_host_pool(model_files):
    large = await running(256, 0)
    [cold] = await rounds(large, PROMPTS, 1)
    await finish(large)
    small = await running(14, 64)
    answers = await rounds(small, PROMPTS, 3)
    for answered in answers:
        assert [a.token_ids for a in answered] == [a.token_ids for a in cold]
    stats = small.manager.stats()
    assert stats.num_demotions > 0
    assert stats.num_evictions == 0
    whole = [(len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in PROMPTS]
    for answered in answers[1:]:
        assert [a.num_cached_tokens // BLOCK_SIZE * BLOCK_SIZE for a in answered] == whole
    assert stats.host_bytes_per_s != 4e9  # measured by now
    assert stats.prefill_tokens_per_s != 2000.0
    await finish(small)


async def test_without_a_host_pool_it_is_computed_again(model_files):
    small = await running(14, 0)
    first, second = await rounds(small, PROMPTS, 2)
    assert [a.token_ids for a in first] == [a.token_ids for a in second]
    stats = small.manager.stats()
    assert (stats.num_demotions, stats.num_host_blocks) == (0, 0)
    assert stats.num_evictions > 0
    await finish(small)


async def test_a_prompt_that_begins_like_another_starts_within_a_block(model_files):
    """The block where they part is copied, and computed from there on."""
    first = PROMPTS[3]
    second = [*first[:41], *range(7000, 7030)]
    alone = await running(64, 0)
    [[expected]] = await rounds(alone, [second], 1)
    await finish(alone)
    together = await running(64, 0)
    [[_, answer]] = await rounds(together, [first, second], 1)
    assert answer.num_cached_tokens == 41
    assert answer.token_ids == expected.token_ids
    await finish(together)
