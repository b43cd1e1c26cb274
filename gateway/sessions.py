"""Conversations that are kept: their tokens here, their KV under pins of the kvstore.

The pin only saves time. A session whose pin was refused or is lost goes on through
the ordinary cache, or by computing its tokens again.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.errors import GatewayError, InvalidField, SessionBusy, SessionNotFound
from gateway.ports import Namespace, PinPlan

DEFAULT_TTL = 600.0
_TTL_RANGE = (1.0, 86_400.0)
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

_log = logging.getLogger(__name__)

_Key = tuple[str, str]  # tenant and id


class Pins(Protocol):
    """What keeps KV; both raise GatewayError."""

    async def pin_prefix(self, plan: PinPlan) -> None: ...

    async def unpin(self, pin_id: str) -> None: ...


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Keep prompt and first answer as `id` for `ttl` seconds.

    `source_id` names a session whose first `num_source_tokens` tokens, 0: all, come
    before the prompt. Empty: none.
    """

    id: str
    ttl: float = DEFAULT_TTL
    source_id: str = ""
    num_source_tokens: int = 0


@dataclass(slots=True)
class _Session:
    token_ids: array[int]
    ttl: float
    expires_at: float
    plan: PinPlan | None  # None: its KV is not kept


@dataclass(slots=True, eq=False)
class Turn:
    """One request of a session. `prefix` comes before its prompt. To be ended."""

    key: _Key
    options: SessionOptions
    prefix: Sequence[int]


class Sessions:
    """The sessions of one gateway, for one event loop.

    There are at most `max_sessions` with `max_tokens` in all; those that were used
    longest ago lapse first. They end with the process, and with them nothing but
    tokens: pins that it leaves behind end by their own time.

    Invariant: every kept session has a turn's tokens from beginning to end; a turn
    that fails changes nothing.
    """

    def __init__(
        self,
        pins: Pins,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_sessions: int = 1024,
        max_tokens: int = 8 * 2**20,
    ) -> None:
        self._pins = pins
        self._clock = clock
        self._max_sessions, self._max_tokens = max_sessions, max_tokens
        self._sessions: OrderedDict[_Key, _Session] = OrderedDict()  # latest use last
        self._busy: set[_Key] = set()
        self._calls: dict[_Key, asyncio.Task[None]] = {}  # to the kvstore, the latest of each
        self.num_tokens = 0
        self.num_pins = self.num_refused_pins = 0  # since the start

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, tenant: str, options: SessionOptions) -> Turn:
        """Begin a request of a session, which is busy until `end`. Its source is renewed.

        Raises:
            InvalidField: session.id, session.ttl, session.source_id or
                session.source_token_count.
            SessionBusy: another turn of this session has not ended.
            SessionNotFound: there is no source of that name.
        """
        _validate(options)
        self._drop_lapsed()
        key = tenant, options.id
        if key in self._busy:
            raise SessionBusy(options.id)
        turn = Turn(key, options, self._prefix(tenant, options))
        self._busy.add(key)
        return turn

    def keep(self, turn: Turn, token_ids: Iterable[int], namespace: Namespace | None) -> None:
        """Keep these tokens as the turn's session, which replaces the one of that name.

        A pin is taken in the background, in `namespace`; None: the KV can never be found.
        """
        kept, ttl = array("i", token_ids), turn.options.ttl
        replaced = self._drop(turn.key)
        plan = None
        if namespace is not None:
            # A pin's tokens never change, so each turn has a pin of its own.
            pin_id, owner = f"session-{secrets.token_hex(8)}", f"session {turn.options.id}"
            plan = PinPlan(pin_id, owner, kept.tolist(), namespace, ttl)
        self._sessions[turn.key] = _Session(kept, ttl, self._clock() + ttl, plan)
        self.num_tokens += len(kept)
        self._call(turn.key, plan, replaced)
        self._drop_surplus()

    def end(self, turn: Turn) -> None:
        """The session is no longer busy. Safe to repeat, but not after another `begin`."""
        self._busy.discard(turn.key)

    async def settle(self) -> None:
        """Wait until the kvstore has heard of everything."""
        while self._calls:
            await asyncio.gather(*self._calls.values())

    async def close(self) -> None:
        """Call the kvstore no more."""
        for call in self._calls.values():
            call.cancel()
        await asyncio.gather(*self._calls.values(), return_exceptions=True)

    def _prefix(self, tenant: str, options: SessionOptions) -> Sequence[int]:
        if not options.source_id:
            return ()
        key = tenant, options.source_id
        source = self._sessions.get(key)
        if source is None:
            raise SessionNotFound(options.source_id)
        length, count = len(source.token_ids), options.num_source_tokens
        if count > length:
            field = "session.source_token_count"
            raise InvalidField(field, f"{field}: the source has {length} tokens, not {count}")
        source.expires_at = self._clock() + source.ttl
        self._sessions.move_to_end(key)
        if options.source_id != options.id:  # its own pin is replaced anyway
            self._call(key, source.plan, None)
        return source.token_ids[: count or length].tolist()

    # --- what ends --------------------------------------------------------------

    def _drop_lapsed(self) -> None:
        now = self._clock()
        for key in [key for key, one in self._sessions.items() if one.expires_at <= now]:
            self._drop(key)  # the pin has the same time

    def _drop_surplus(self) -> None:
        while len(self._sessions) > self._max_sessions or self.num_tokens > self._max_tokens:
            key = next(iter(self._sessions))
            self._call(key, None, self._drop(key))

    def _drop(self, key: _Key) -> PinPlan | None:
        """Forget a session. Its pin, which the kvstore still has."""
        session = self._sessions.pop(key, None)
        if session is None:
            return None
        self.num_tokens -= len(session.token_ids)
        return session.plan

    # --- the kvstore ------------------------------------------------------------

    def _call(self, key: _Key, taken: PinPlan | None, left: PinPlan | None) -> None:
        """Take or renew a pin and end another, after what was asked for before."""
        if taken is None and left is None:
            return
        before = self._calls.get(key)
        call = asyncio.create_task(self._exchange(before, taken, left))
        self._calls[key] = call

        def forget(done: asyncio.Task[None]) -> None:
            if self._calls.get(key) is done:
                del self._calls[key]

        call.add_done_callback(forget)

    async def _exchange(
        self, before: asyncio.Task[None] | None, taken: PinPlan | None, left: PinPlan | None
    ) -> None:
        if before is not None:
            await asyncio.gather(before, return_exceptions=True)
        try:
            if taken is not None:
                await self._pins.pin_prefix(taken)
                self.num_pins += 1
        except GatewayError as error:
            self.num_refused_pins += 1
            _log.info("%s is not pinned: %s", taken and taken.owner, error)
        try:
            if left is not None:
                await self._pins.unpin(left.pin_id)
        except GatewayError as error:  # it ends by its own time
            _log.info("%s is still pinned: %s", left and left.owner, error)


def _validate(options: SessionOptions) -> None:
    if not _ID.fullmatch(options.id):
        raise InvalidField("session.id", "session.id: must be 1 to 64 of A-Z a-z 0-9 _ -")
    low, high = _TTL_RANGE
    if not low <= options.ttl <= high:
        text = f"session.ttl: must be from {low:g} to {high:g} seconds, not {options.ttl:g}"
        raise InvalidField("session.ttl", text)
    if options.source_id and not _ID.fullmatch(options.source_id):
        field = "session.source_id"
        raise InvalidField(field, f"{field}: must be 1 to 64 of A-Z a-z 0-9 _ -")
    if options.num_source_tokens < 0 or (options.num_source_tokens and not options.source_id):
        field = "session.source_token_count"
        raise InvalidField(field, f"{field}: must not be negative, and needs a source")
