"""Several generations of one request, side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TypeVar

E = TypeVar("E")


async def merged(streams: Sequence[AsyncIterator[E]]) -> AsyncGenerator[tuple[int, E]]:
    """Items of all streams as they come, each with the index of its stream.

    The first error ends all. When this iterator ends or is closed, for whatever
    reason, every stream has been closed.
    """
    # Unbounded, yet never longer than what the token limits allow.
    arrived: asyncio.Queue[tuple[int, E] | Exception | None] = asyncio.Queue()

    async def forward(index: int, stream: AsyncIterator[E]) -> None:
        try:
            async for item in stream:
                arrived.put_nowait((index, item))
        except Exception as error:
            arrived.put_nowait(error)
        else:
            arrived.put_nowait(None)

    tasks = [asyncio.create_task(forward(i, stream)) for i, stream in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await arrived.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
