"""The HTTP server's start and stop."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from services.common.startup import StartupError
from services.gateway.rest.server import RestServer

STREAM = {"model": "fake/model", "prompt": "hello", "stream": True}


@pytest.fixture
async def server(app):
    server = RestServer(app, "127.0.0.1:0")
    await server.start()
    yield server
    await server.stop(grace=1)


async def test_busy_port_is_named_and_its_owner_goes_on(app, server):
    with pytest.raises(StartupError, match=server.address):
        await RestServer(app, server.address).start()
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"http://{server.address}/health/live")).status_code == 200


async def test_stop_lets_a_running_answer_end(engine, server):
    engine.gate.clear()
    async with httpx.AsyncClient(base_url=f"http://{server.address}") as client:
        async with client.stream("POST", "/v1/completions", json=STREAM) as response:
            stopping = asyncio.create_task(server.stop(grace=30))
            await asyncio.sleep(0)
            engine.gate.set()
            assert (await response.aread()).endswith(b"data: [DONE]\n\n")
        await stopping
        with pytest.raises(httpx.ConnectError):
            await client.get("/health/live")


async def test_stop_cuts_off_what_outlasts_the_grace(engine, server):
    engine.gate.clear()
    url = f"http://{server.address}/v1/completions"
    async with httpx.AsyncClient() as client, client.stream("POST", url, json=STREAM) as response:
        assert response.status_code == 200
        await server.stop(grace=0)
        with pytest.raises(httpx.RemoteProtocolError):
            await response.aread()
    assert not engine.running


async def test_stop_is_safe_before_start_and_twice(app):
    server = RestServer(app, "127.0.0.1:0")
    await server.stop(grace=0)
    await server.start()
    await server.stop(grace=0)
    await server.stop(grace=0)
