"""A client that leaves has cancelled its request."""

from __future__ import annotations

import asyncio
import json

import pytest

from gateway.errors import RequestNotFound


async def post(url, path, body):
    """Send a request over a bare socket; the answer is left unread."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hello", ["ab", "cd", "ef"]])
async def test_leaving_before_the_first_token_cancels(url, engine, until, stream, prompt):
    engine.gate.clear()
    body = {"model": "fake/model", "prompt": prompt, "stream": stream}
    num_prompts = 3 if isinstance(prompt, list) else 1
    _, writer = await post(url, "/v1/completions", body)
    await until(lambda: len(engine.running) == num_prompts)
    writer.close()
    await until(lambda: not engine.running)
    assert engine.endings == {"closed": num_prompts}


async def test_leaving_amid_a_stream_cancels(url, engine, until):
    engine.gate.clear()
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "fake/model", "messages": messages, "stream": True}
    reader, writer = await post(url, "/v1/chat/completions", body)
    assert b'"role":"assistant"' in await reader.readuntil(b"\n\n\r\n")
    assert len(engine.running) == 1
    writer.close()
    await until(lambda: not engine.running)
    assert engine.endings == {"closed": 1}


async def test_leaving_amid_the_body_starts_nothing(url, engine, until, client):
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(head + b"Content-Length: 1000\r\n\r\n{")
    await writer.drain()
    writer.close()

    async def counted():
        while 'status="499"' not in (await client.get("/metrics")).text:  # noqa: ASYNC110 - nothing to wait on
            await asyncio.sleep(0.005)

    await counted()
    assert engine.requests == []


async def test_others_go_on_when_one_leaves(url, engine, until):
    engine.gate.clear()
    body = {"model": "fake/model", "prompt": "hello"}
    _, leaving = await post(url, "/v1/completions", body)
    await until(lambda: len(engine.running) == 1)
    reader, staying = await post(url, "/v1/completions", body)
    await until(lambda: len(engine.running) == 2)
    leaving.close()
    await until(lambda: engine.endings["closed"] == 1)
    engine.gate.set()
    assert b"200 OK" in await reader.readline()
    staying.close()
    await until(lambda: engine.endings["finished"] == 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_cancelling_by_id_is_told_to_the_waiting_client(client, engine, until, stream):
    engine.gate.clear()
    body = {"model": "fake/model", "prompt": "hello", "stream": stream}
    asked = asyncio.create_task(client.post("/v1/completions", json=body))
    await until(lambda: engine.running)
    [request_id] = engine.running
    engine.cancel(request_id)
    response = await asked
    assert response.status_code == (200 if stream else 409)
    assert "request_cancelled" in response.text
    with pytest.raises(RequestNotFound):
        engine.cancel(request_id)
