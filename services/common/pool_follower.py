"""Which blocks a kvstore holds, as seen by somebody who follows its events.

docs/events.md has the rules. `PoolView` keeps them and knows no transport; `PoolFollower`
feeds it from a kvstore, again and again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import structlog
from quire.kvstore.v1 import kvstore_pb2 as pb
from quire.kvstore.v1 import kvstore_pb2_grpc

from services.common.errors import error_details
from services.common.server import CHANNEL_OPTIONS

_log = structlog.get_logger()

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0

# Refusals that only a snapshot helps against.
_LOST = (grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.INVALID_ARGUMENT)


class EventGap(Exception):
    """An event is not the one that had to come next."""


class PoolView:
    """The keys of the blocks that can be found in one kvstore.

    States: empty, current (a snapshot and all events since), stale (a gap was found: the
    keys are those before it). A new snapshot replaces the keys once it is complete; those
    of an earlier epoch go with the first message of a new one.
    """

    def __init__(self) -> None:
        self.epoch = 0  # 0: none yet
        self.number = 0  # of the last event that is in `keys`
        self.keys: set[bytes] = set()
        self.is_current = False
        self._incoming: set[bytes] | None = None  # of a snapshot that is not complete
        self._incoming_number = 0

    def request(self) -> pb.WatchPoolEventsRequest:
        """How to go on: after the last event, or with a snapshot."""
        self._incoming = None
        if not self.is_current:
            return pb.WatchPoolEventsRequest()
        return pb.WatchPoolEventsRequest(epoch=self.epoch, after_number=self.number)

    def lose_track(self) -> None:
        """Events were missed: ask for a snapshot next."""
        self.is_current = False

    def count_leading(self, keys: Sequence[bytes]) -> int:
        """How many of a prompt's blocks, in their order, are in the pool without a hole."""
        for index, key in enumerate(keys):
            if key not in self.keys:
                return index
        return len(keys)

    def apply(self, message: pb.WatchPoolEventsResponse) -> None:
        """Take in one message of a stream.

        Raises:
            EventGap: another event had to come. The view is stale; ask for a snapshot.
        """
        if message.epoch != self.epoch:
            self._begin_epoch(message.epoch)
        if message.WhichOneof("event") == "snapshot":
            self._add_part(message)
            return
        if not self.is_current or self._incoming is not None or message.number != self.number + 1:
            expected = self.number + 1 if self.is_current else "a snapshot"
            self.lose_track()
            raise EventGap(f"event {message.number} came instead of {expected}")
        self._apply_event(message)
        self.number = message.number

    def _begin_epoch(self, epoch: int) -> None:
        """Another incarnation: what the last one held is gone."""
        self.epoch, self.number = epoch, 0
        self.keys, self._incoming = set(), None
        self.is_current = False

    def _add_part(self, message: pb.WatchPoolEventsResponse) -> None:
        if self._incoming is None:
            self._incoming, self._incoming_number = set(), message.number
        elif message.number != self._incoming_number:
            self.lose_track()
            raise EventGap("two snapshots are mixed up")
        self._incoming.update(message.snapshot.keys)
        if message.snapshot.is_last:
            self.keys, self._incoming = self._incoming, None
            self.number, self.is_current = message.number, True

    def _apply_event(self, message: pb.WatchPoolEventsResponse) -> None:
        match message.WhichOneof("event"):
            case "stored":
                self.keys.update(message.stored.keys)
            case "evicted":
                self.keys.difference_update(message.evicted.keys)
            case "cleared":
                self.keys.clear()
            case _:  # of a later version: what it changed is unknown
                self.lose_track()
                raise EventGap(f"event {message.number} is of no known kind")


class PoolFollower:
    """Keeps a view up to date with a kvstore that may come and go.

    `run` returns only when it is cancelled. A lost connection leaves the view as it is; it
    is resumed from the last event if the kvstore still has what came after.
    """

    def __init__(self, target: str) -> None:
        """`target` is HOST:PORT or unix:PATH. Connects in `run`."""
        self.view = PoolView()
        self._target = target

    async def run(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        async with grpc.aio.insecure_channel(self._target, options=CHANNEL_OPTIONS) as channel:
            stub = kvstore_pb2_grpc.KvCacheServiceStub(channel)
            while True:
                if await self._follow(stub):
                    pause = _FIRST_PAUSE_SECONDS
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def _follow(self, stub: kvstore_pb2_grpc.KvCacheServiceStub) -> bool:
        """One stream from its beginning to its end. Whether anything came of it."""
        has_news = False
        call = stub.WatchPoolEvents(self.view.request())
        try:
            async for message in call:
                self.view.apply(message)
                has_news = True
        except EventGap as gap:
            _log.warning("pool events lost", target=self._target, error=str(gap))
        except grpc.RpcError as error:
            if error.code() in _LOST:
                self.view.lose_track()
            status = error_details(error)
            _log.info("pool events ended", target=self._target, reason=status.reason)
        finally:
            call.cancel()
        return has_news
