"""Bad input: an error that names the field, and a service as healthy as before."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request

import httpx
import pytest

from gateway.errors import QueueFull, WorkerUnavailable
from services.gateway.rest import connection
from tests.unit.services.gateway.refused_bodies import (
    CHAT_CASES,
    COMPLETION_CASES,
    INVALID,
    UNKNOWN,
)

COMPLETION = {"model": "fake/model", "prompt": "hello", "max_tokens": 3}
CHAT = {"model": "fake/model", "messages": [{"role": "user", "content": "hi"}]}
JSON = {"content-type": "application/json"}


@pytest.fixture
async def refused(client):
    """Post a body, check that the answer is an error and that the next request succeeds."""

    async def post(path, body, **extra):
        extra |= {"json": body} if not isinstance(body, bytes) else {"content": body}
        response = await client.post(path, **extra)
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200
        content = response.json()
        assert content.keys() == {"error"}
        assert content["error"].keys() == {"message", "type", "param", "code"}
        assert content["error"]["message"]
        assert response.headers["x-request-id"]
        return response.status_code, content["error"]["param"], content["error"]["code"]

    return post


@pytest.mark.parametrize(("extra", "param", "code"), COMPLETION_CASES, ids=lambda v: str(v)[:40])
async def test_bad_completion_names_its_field(refused, engine, extra, param, code):
    assert await refused("/v1/completions", COMPLETION | extra) == (400, param, code)
    assert not engine.running


@pytest.mark.parametrize(("extra", "param", "code"), CHAT_CASES, ids=lambda v: str(v)[:60])
async def test_bad_chat_names_its_field(refused, engine, extra, param, code):
    assert await refused("/v1/chat/completions", CHAT | extra) == (400, param, code)
    assert not engine.running


@pytest.mark.parametrize("missing", ["model", "prompt"])
async def test_missing_field_is_named(refused, missing):
    body = {key: value for key, value in COMPLETION.items() if key != missing}
    assert await refused("/v1/completions", body) == (400, missing, INVALID)


async def test_unknown_model_is_404(refused, engine):
    result = await refused("/v1/completions", COMPLETION | {"model": "gpt-9"})
    assert result == (404, "model", "model_not_found")
    assert len(engine.requests) == 1  # the good one that follows


MALFORMED = {
    "empty": b"",
    "cut off": b'{"model": "fake/model", ',
    "not an object": b"[1]",
    "null": b"null",
    "trailing": b"{} {}",
    "deep array": b"[" * 50_000,
    "deep object": b'{"a":' * 10_000,
    "invalid UTF-8": b'{"model": "fake/model", "prompt": "\xff\xfe"}',
    "encoded surrogate": b'{"model": "fake/model", "prompt": "\xed\xa0\x80"}',
    "lone surrogate": b'{"model": "fake/model", "prompt": "\\ud800"}',
    "UTF-16": '{"model": "fake/model"}'.encode("utf-16"),
    "huge number": b'{"max_tokens": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_malformed_json_is_refused(refused, path, body):
    assert await refused(path, body, headers=JSON) == (400, "body", INVALID)


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
async def test_what_is_no_finite_number_is_refused_with_its_field(refused, number):
    body = b'{"model": "fake/model", "prompt": "a", "temperature": ' + number + b"}"
    assert await refused("/v1/completions", body, headers=JSON) == (400, "temperature", INVALID)


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": "application/json", "content-encoding": "gzip"},
        {},
    ],
    ids=str,
)
async def test_wrong_content_type_is_415(refused, headers):
    status, _, code = await refused("/v1/completions", json.dumps(CHAT).encode(), headers=headers)
    assert (status, code) == (415, "unsupported_media_type")


async def test_charset_utf8_is_accepted(client):
    headers = {"content-type": "Application/JSON; charset=UTF-8"}
    body = json.dumps(COMPLETION).encode()
    response = await client.post("/v1/completions", content=body, headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize("announced", [True, False])
async def test_body_over_the_limit_is_413_with_the_limit(url, engine, announced):
    body = json.dumps(COMPLETION | {"prompt": [5] * 1_300_000}).encode()

    async def pieces():
        for start in range(0, len(body), 65536):
            yield body[start : start + 65536]

    async with httpx.AsyncClient(base_url=url) as client:
        content = body if announced else pieces()
        response = await client.post("/v1/completions", content=content, headers=JSON)
        assert response.status_code == 413
        assert "65536" in response.json()["error"]["message"]
        assert engine.requests == []
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200


async def test_a_client_that_sends_before_it_listens_gets_its_413_too(url):
    """urllib writes the whole body first; a reset in the middle would be all it saw."""
    body = json.dumps(COMPLETION | {"prompt": "x" * 12_000_000}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, JSON)
    with pytest.raises(urllib.error.HTTPError) as raised:
        await asyncio.to_thread(urllib.request.urlopen, request, timeout=30)
    assert raised.value.code == 413
    raised.value.close()


async def test_a_body_that_never_ends_is_given_up(url, engine, monkeypatch):
    monkeypatch.setattr(connection, "_BODY_SECONDS", 0.1)

    async def pieces():
        yield b'{"model": '
        await asyncio.sleep(1)

    async with httpx.AsyncClient(base_url=url) as client:
        response = await client.post("/v1/completions", content=pieces(), headers=JSON)
    assert (response.status_code, response.json()["error"]["code"]) == (408, "request_timeout")
    assert engine.requests == []


async def test_enormous_name_is_not_sent_back(client):
    body = COMPLETION | {"x" * 50_000: 1}
    response = await client.post("/v1/completions", json=body)
    assert response.json()["error"]["code"] == UNKNOWN
    assert len(response.content) < 5_000


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1/models/", 404, "model_not_found"),
    ],
)
async def test_wrong_paths_and_methods_have_the_same_shape(client, method, path, status, code):
    response = await client.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert response.headers["x-request-id"]
    if status == 405:
        assert response.headers["allow"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code", "retry_after"),
    [
        (QueueFull(limit=3, retry_after=2.5), 429, "queue_full", "3"),
        (WorkerUnavailable("loading", retry_after=1), 503, "unavailable", "1"),
    ],
)
async def test_refusals_say_when_to_retry(client, engine, error, status, code, retry_after, stream):
    engine.error = error
    response = await client.post("/v1/completions", json=COMPLETION | {"stream": stream})
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert response.headers["retry-after"] == retry_after


@pytest.mark.parametrize("stream", [False, True])
async def test_bug_has_a_fixed_text(client, engine, stream):
    engine.error = RuntimeError("secret")
    response = await client.post("/v1/completions", json=COMPLETION | {"stream": stream})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.json()["error"]["code"] == "internal"
    engine.error = None
    assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200


async def test_one_bad_prompt_of_several_ends_the_others(client, engine):
    body = {"model": "fake/model", "prompt": [[97], [999]]}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert not engine.running
