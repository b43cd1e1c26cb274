"""WatchPoolEvents: one stream per watcher over the pool's one log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from quire.kvstore.v1 import kvstore_pb2 as pb

from kvstore.errors import TooManyWatchers
from kvstore.events import EventLog
from kvstore.manager import PageManager
from services.kvstore import event_codec

# A watcher may hold a copy of the key table while it sends its snapshot.
_MOST_WATCHERS = 32

# Events that are taken from the log at a time; the other streams come between.
_BATCH = 64


class EventStreams:
    """All streams of pool events of this process.

    Each keeps only the number of the last event it has sent, and reads on from there when
    its client has taken what it got. So a client that is slow holds up nobody and keeps
    nothing alive; when the log has moved on too far, its stream ends with EVENTS_TOO_OLD.
    """

    def __init__(self, manager: PageManager) -> None:
        self._manager = manager
        self._signals: set[asyncio.Event] = set()  # one for each stream
        self._is_closed = False

    @property
    def num_watchers(self) -> int:
        return len(self._signals)

    def close(self) -> None:
        """End all streams, and new ones at once."""
        self._is_closed = True
        for signal in self._signals:
            signal.set()

    async def watch(
        self, request: pb.WatchPoolEventsRequest
    ) -> AsyncGenerator[pb.WatchPoolEventsResponse, None]:
        """The messages of one stream; see the contract.

        Raises:
            PoolNotAttached, InvalidRequest, EventsTooOld, TooManyWatchers
        """
        log = self._manager.events()
        if len(self._signals) >= _MOST_WATCHERS:
            raise TooManyWatchers(limit=_MOST_WATCHERS)
        signal = asyncio.Event()
        self._signals.add(signal)
        log.wakers.add(signal.set)
        try:
            log.start()
            number = request.after_number
            if not number or request.epoch != log.epoch:
                while log.is_filling and not self._is_closed:
                    log.advance()
                    await asyncio.sleep(0)
                if self._is_closed:
                    return
                snapshot = log.snapshot(request.include_token_ids)
                number = snapshot.number
                for part in event_codec.snapshot_parts(log.epoch, log.block_size, snapshot):
                    yield part
            async for message in self._events(log, number, request, signal):
                yield message
        finally:
            log.wakers.discard(signal.set)
            self._signals.discard(signal)

    async def _events(
        self,
        log: EventLog,
        number: int,
        request: pb.WatchPoolEventsRequest,
        signal: asyncio.Event,
    ) -> AsyncGenerator[pb.WatchPoolEventsResponse, None]:
        """The events after `number`, until there will be no more."""
        while not self._is_closed:
            signal.clear()
            has_more = log.advance()
            events = log.read(number, _BATCH)
            for event in events:
                number = event.number
                yield event_codec.pool_event(
                    log.epoch, log.block_size, event, request.include_token_ids
                )
            if events or has_more:
                await asyncio.sleep(0)
            elif log.is_closed:
                return
            else:
                await signal.wait()
