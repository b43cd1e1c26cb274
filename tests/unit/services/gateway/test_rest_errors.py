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

COMPLETION = {"model": "fake/model", "prompt": "hello", "max_tokens": 3}
CHAT = {"model": "fake/model", "messages": [{"role": "user", "content": "hi"}]}
JSON = {"content-type": "application/json"}
JSON_OBJECT = {"type": "json_object"}
UNSUPPORTED, UNKNOWN, INVALID = "unsupported_option", "unknown_field", "invalid_field"


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


COMPLETION_CASES = [
    ({"prompt": ""}, "prompt", INVALID),
    ({"prompt": []}, "prompt", INVALID),
    ({"prompt": None}, "prompt", INVALID),
    ({"prompt": 5}, "prompt", INVALID),
    ({"prompt": {"a": 1}}, "prompt", INVALID),
    ({"prompt": ["a", ""]}, "prompt[1]", INVALID),
    ({"prompt": [[1], []]}, "prompt[1]", INVALID),
    ({"prompt": [1, True]}, "prompt[0]", INVALID),
    ({"prompt": [1, 2.5]}, "prompt[0]", INVALID),
    ({"prompt": [[1, "a"]]}, "prompt[0]", INVALID),
    ({"prompt": ["a"] * 257}, "prompt", INVALID),
    ({"prompt": [999999]}, "prompt", INVALID),
    ({"prompt": [-1]}, "prompt", INVALID),
    ({"prompt": "x" * 600}, "prompt", "context_length_exceeded"),
    ({"max_tokens": 10**30}, "max_tokens", "context_length_exceeded"),
    ({"max_tokens": -1}, "max_tokens", INVALID),
    ({"max_tokens": 0}, "max_tokens", INVALID),
    ({"max_tokens": "5"}, "max_tokens", INVALID),
    ({"max_tokens": 5.0}, "max_tokens", INVALID),
    ({"max_tokens": True}, "max_tokens", INVALID),
    ({"max_tokens": [5]}, "max_tokens", INVALID),
    ({"max_completion_tokens": 5}, "max_completion_tokens", UNKNOWN),
    ({"temperature": -0.1}, "temperature", INVALID),
    ({"temperature": 2.1}, "temperature", INVALID),
    ({"temperature": "1"}, "temperature", INVALID),
    ({"temperature": True}, "temperature", INVALID),
    ({"top_p": 0}, "top_p", INVALID),
    ({"top_p": 1.5}, "top_p", INVALID),
    ({"top_k": -2}, "top_k", INVALID),
    ({"top_k": 2**31}, "top_k", INVALID),
    ({"min_p": 2}, "min_p", INVALID),
    ({"seed": 1.5}, "seed", INVALID),
    ({"seed": 2**64}, "seed", INVALID),
    ({"stop": ""}, "stop[0]", INVALID),
    ({"stop": ["a", None]}, "stop[1]", INVALID),
    ({"stop": 5}, "stop", INVALID),
    ({"stop": {"a": 1}}, "stop", INVALID),
    ({"store": True}, "store", UNSUPPORTED),
    ({"stop": ["a"] * 17}, "stop", INVALID),
    ({"stream": "true"}, "stream", INVALID),
    ({"stream": 1}, "stream", INVALID),
    ({"stream_options": {"include_usage": True}}, "stream_options", INVALID),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", UNKNOWN),
    ({"stream": True, "stream_options": 1}, "stream_options", INVALID),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        UNSUPPORTED,
    ),
    ({"ignore_eos": 1}, "ignore_eos", INVALID),
    ({"user": 1}, "user", INVALID),
    ({"metadata": {"a": 1}}, "metadata.a", INVALID),
    ({"model": None}, "model", INVALID),
    ({"model": 1}, "model", INVALID),
    ({"n": 0}, "n", INVALID),
    ({"n": 65}, "n", INVALID),
    ({"n": True}, "n", INVALID),
    ({"n": 2, "temperature": 0}, "n", INVALID),
    ({"n": 64, "max_tokens": 400}, "n", "prompt_exceeds_pool"),
    ({"best_of": 3, "n": 4}, "best_of", INVALID),
    ({"best_of": 65}, "best_of", INVALID),
    ({"best_of": 2, "stream": True}, "best_of", INVALID),
    ({"echo": 1}, "echo", INVALID),
    ({"logprobs": 21}, "logprobs", INVALID),
    ({"logprobs": True}, "logprobs", INVALID),
    ({"prompt_logprobs": 21}, "prompt_logprobs", INVALID),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", INVALID),
    ({"logit_bias": {"256": 1}}, "logit_bias.256", INVALID),
    ({"logit_bias": {"7": 0, "5": 101}}, "logit_bias.5", INVALID),
    ({"logit_bias": {"x": 1}}, "logit_bias.x", INVALID),
    ({"logit_bias": {"05": 1}}, "logit_bias.05", INVALID),
    ({"logit_bias": {"-1": 1}}, "logit_bias.-1", INVALID),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias." + "9" * 489 + "…", INVALID),
    ({"logit_bias": {"5": "1"}}, "logit_bias.5", INVALID),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", INVALID),
    ({"logit_bias": [5]}, "logit_bias", INVALID),
    ({"presence_penalty": 2.1}, "presence_penalty", INVALID),
    ({"frequency_penalty": -2.1}, "frequency_penalty", INVALID),
    ({"repetition_penalty": 0}, "repetition_penalty", INVALID),
    ({"typical_p": 0}, "typical_p", INVALID),
    ({"min_tokens": 4}, "min_tokens", INVALID),
    ({"min_tokens": -1}, "min_tokens", INVALID),
    ({"stop_token_ids": [256]}, "stop_token_ids[0]", INVALID),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]", INVALID),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids", INVALID),
    ({"priority": 101}, "priority", INVALID),
    ({"cache_salt": "é" * 65}, "cache_salt", INVALID),
    ({"num_beams": 33}, "num_beams", INVALID),
    ({"num_beams": 2, "stream": True}, "num_beams", INVALID),
    ({"num_beams": 2, "temperature": 1}, "temperature", INVALID),
    ({"num_beams": 2, "n": 3}, "n", INVALID),
    ({"num_beams": 2, "best_of": 2}, "best_of", INVALID),
    ({"num_beams": 2, "stop": "x"}, "stop", INVALID),
    ({"num_beams": 2, "logprobs": 1}, "logprobs", INVALID),
    ({"num_beams": 2, "prompt_logprobs": 1}, "prompt_logprobs", INVALID),
    ({"num_beams": 2, "response_format": JSON_OBJECT}, "response_format", INVALID),
    ({"num_beams": 2, "length_penalty": 11}, "length_penalty", INVALID),
    ({"length_penalty": 2}, "length_penalty", INVALID),
    ({"early_stopping": True}, "early_stopping", INVALID),
    ({"num_beams": 2, "early_stopping": "always"}, "early_stopping", INVALID),
    ({"num_beams": 2, "early_stopping": 1}, "early_stopping", INVALID),
    ({"response_format": {"type": "xml"}}, "response_format.type", INVALID),
    ({"response_format": "json"}, "response_format", INVALID),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", INVALID),
    (
        {"response_format": JSON_OBJECT | {"json_schema": {"schema": {}}}},
        "response_format.json_schema",
        INVALID,
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
        INVALID,
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"bad": 1}}}},
        "response_format",
        INVALID,
    ),
    ({"response_format": JSON_OBJECT, "ignore_eos": True}, "ignore_eos", INVALID),
    ({"response_format": JSON_OBJECT, "min_tokens": 1}, "min_tokens", INVALID),
    (
        {"response_format": JSON_OBJECT, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        INVALID,
    ),
    ({"structured_outputs": {}}, "structured_outputs", INVALID),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", INVALID),
    ({"structured_outputs": {"regex": "bad"}}, "structured_outputs.regex", INVALID),
    ({"structured_outputs": {"grammar": "bad"}}, "structured_outputs.grammar", INVALID),
    ({"structured_outputs": {"json": "bad"}}, "structured_outputs.json", INVALID),
    ({"structured_outputs": {"json": 1}}, "structured_outputs.json", INVALID),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", INVALID),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]", INVALID),
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml", UNKNOWN),
    ({"session": {}}, "session.id", INVALID),
    ({"session": {"id": "a b"}}, "session.id", INVALID),
    ({"session": {"id": "a", "ttl": 0}}, "session.ttl", INVALID),
    ({"session": {"id": "a", "source_id": "b"}}, "session.source_id", UNKNOWN),
    ({"session": {"id": "a"}, "prompt": ["a", "b"]}, "session", INVALID),
    ({"suffix": "x"}, "suffix", UNSUPPORTED),
    ({"temprature": 0}, "temprature", UNKNOWN),
    ({"messages": []}, "messages", UNKNOWN),
]


@pytest.mark.parametrize(("extra", "param", "code"), COMPLETION_CASES, ids=lambda v: str(v)[:40])
async def test_bad_completion_names_its_field(refused, engine, extra, param, code):
    assert await refused("/v1/completions", COMPLETION | extra) == (400, param, code)
    assert not engine.running


CHAT_CASES = [
    ({"messages": []}, "messages", INVALID),
    ({"messages": "hi"}, "messages", INVALID),
    ({"messages": ["hi"]}, "messages[0]", INVALID),
    ({"messages": [{"role": "user"}]}, "messages[0].content", INVALID),
    ({"messages": [{"content": "hi"}]}, "messages[0].role", INVALID),
    ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role", INVALID),
    ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].role", UNSUPPORTED),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", INVALID),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content", INVALID),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", INVALID),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
        UNSUPPORTED,
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
        INVALID,
    ),
    (
        {"messages": [{"role": "user", "content": ["hi"]}]},
        "messages[0].content[0]",
        INVALID,
    ),
    (
        {"messages": [{"role": "user", "content": "a", "name": "b"}]},
        "messages[0].name",
        UNSUPPORTED,
    ),
    ({"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages[0].x", UNKNOWN),
    ({"messages": [{"role": "user", "content": "a" * 600}]}, "messages", "context_length_exceeded"),
    ({"max_completion_tokens": 9999}, "max_completion_tokens", "context_length_exceeded"),
    ({"max_completion_tokens": -5}, "max_completion_tokens", INVALID),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens", INVALID),
    ({"logprobs": 1}, "logprobs", INVALID),
    ({"top_logprobs": 5}, "top_logprobs", INVALID),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", INVALID),
    ({"num_beams": 2, "logprobs": True, "top_logprobs": 1}, "logprobs", INVALID),
    ({"echo": True}, "echo", UNKNOWN),
    ({"tools": [{"type": "function"}]}, "tools", UNSUPPORTED),
    ({"tool_choice": "required"}, "tool_choice", UNSUPPORTED),
    ({"store": True}, "store", UNSUPPORTED),
    ({"reasoning_effort": "high"}, "reasoning_effort", UNSUPPORTED),
    ({"modalities": ["text", "audio"]}, "modalities", UNSUPPORTED),
    ({"best_of": 1}, "best_of", UNKNOWN),
]


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
