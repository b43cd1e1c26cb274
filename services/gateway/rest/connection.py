"""What a route does with its connection: read the body, notice that the client left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from services.gateway.rest.errors import BodyTooLarge, ClientDisconnected, HttpError

T = TypeVar("T")

_BODY_SECONDS = 60.0
_DISCARD_SECONDS = 2.0
_DISCARD_BYTES = 64 * 2**20


async def read_json_body(request: Request, limit: int) -> bytes:
    """The body, if it claims to be JSON and has at most `limit` bytes.

    A larger one is refused without being kept.

    Raises:
        HttpError: 408, 413 or 415.
        ClientDisconnected: it left before the body was complete.
    """
    _check_type(request)
    pieces = request.stream()
    try:
        if _announced_length(request) > limit:
            # A client that asks before it sends has not begun.
            if request.headers.get("expect", "").lower() != "100-continue":
                await _discard(pieces)
            raise BodyTooLarge(limit)
        async with asyncio.timeout(_BODY_SECONDS):
            return await _read(pieces, limit)
    except TimeoutError:
        text = f"the body was not complete after {_BODY_SECONDS:g} s"
        raise HttpError(408, "request_timeout", text, headers={"connection": "close"}) from None
    except ClientDisconnect:
        raise ClientDisconnected from None


async def _read(pieces: AsyncIterator[bytes], limit: int) -> bytes:
    body = bytearray()
    async for piece in pieces:
        if len(body) + len(piece) > limit:
            await _discard(pieces)
            raise BodyTooLarge(limit)
        body += piece
    return bytes(body)


async def _discard(pieces: AsyncIterator[bytes]) -> None:
    """Read on for a while: a client that still sends would get a reset and no answer."""
    num_bytes = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_SECONDS):
            async for piece in pieces:
                num_bytes += len(piece)
                if num_bytes > _DISCARD_BYTES:
                    return


def _announced_length(request: Request) -> int:
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() else 0


def _check_type(request: Request) -> None:
    # No type is not JSON either: a web page can make a browser post to this machine
    # without asking, but not with this type.
    media_type, _, rest = request.headers.get("content-type", "").partition(";")
    if media_type.strip().lower() != "application/json":
        raise HttpError(415, "unsupported_media_type", "Content-Type must be application/json")
    charset = rest.partition("charset=")[2].strip(' "').lower()
    if charset not in ("", "utf-8", "utf8"):
        raise HttpError(415, "unsupported_media_type", "the body must be in UTF-8")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise HttpError(415, "unsupported_media_type", "compressed bodies are not supported")


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves.

    Raises:
        ClientDisconnected: `work` has been cancelled and has ended.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnected
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
