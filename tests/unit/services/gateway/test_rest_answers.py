"""What clients get for good requests."""

from __future__ import annotations

import json

import pytest
import structlog

from gateway.errors import WorkerUnavailable
from kvstore.types import PoolStats, TenantUsage
from services.gateway.frontend import Frontend
from services.gateway.metrics import Metrics

COMPLETION = {"model": "fake/model", "prompt": "hello", "max_tokens": 3}
CHAT = {"model": "fake/model", "messages": [{"role": "user", "content": "hi"}]}


def events_of(response):
    """The data of the server-sent events, [DONE] as a string."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    datas = [line.removeprefix("data: ") for line in lines]
    return [data if data == "[DONE]" else json.loads(data) for data in datas]


async def test_completion_has_text_reason_and_usage(client):
    response = await client.post("/v1/completions", json=COMPLETION)
    answer = response.json()
    assert response.status_code == 200
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "fake/model"
    assert isinstance(answer["created"], int)
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "HEL",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 16},
    }


async def test_completion_without_max_tokens_has_the_default_of_16(client, engine):
    await client.post("/v1/completions", json={"model": "fake/model", "prompt": "hello"})
    assert engine.requests[0].max_tokens == 16


async def test_chat_answers_as_the_assistant(client, engine):
    answer = (await client.post("/v1/chat/completions", json=CHAT)).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    [choice] = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "<USER>HI"
    assert choice["finish_reason"] == "stop"
    assert engine.requests[0].max_tokens is None


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["AB"]),
        (["ab", "cd"], ["AB", "CD"]),
        ([97, 98], ["AB"]),
        ([[97, 98], [99]], ["AB", "C"]),
        (["ab", [99]], ["AB", "C"]),
    ],
)
async def test_each_prompt_gets_the_choice_at_its_index(client, prompt, texts):
    body = {"model": "fake/model", "prompt": prompt}
    answer = (await client.post("/v1/completions", json=body)).json()
    choices = [(choice["index"], choice["text"]) for choice in answer["choices"]]
    assert choices == list(enumerate(texts))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, texts))
    assert answer["usage"]["completion_tokens"] == sum(map(len, texts))


async def test_completion_stream_ends_with_reason_usage_and_done(client):
    body = COMPLETION | {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, done = events_of(await client.post("/v1/completions", json=body))
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == "HEL"
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == [None] * (len(choices) - 1) + ["length"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1


async def test_stream_without_include_usage_has_none(client):
    events = events_of(await client.post("/v1/completions", json=COMPLETION | {"stream": True}))
    assert events[-1] == "[DONE]"
    assert all("usage" not in event for event in events[:-1])


async def test_chat_stream_begins_with_the_role(client):
    body = CHAT | {"stream": True}
    first, *rest, closing, done = events_of(await client.post("/v1/chat/completions", json=body))
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in rest) == "<USER>HI"
    assert closing["choices"][0]["delta"] == {}
    assert closing["choices"][0]["finish_reason"] == "stop"
    assert done == "[DONE]"


async def test_stream_of_several_prompts_tells_them_apart(client):
    body = {"model": "fake/model", "prompt": ["abc", "de"], "stream": True}
    *chunks, done = events_of(await client.post("/v1/completions", json=body))
    texts, reasons = {0: "", 1: ""}, {}
    for chunk in chunks:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == {0: "ABC", 1: "DE"}
    assert reasons == {0: "stop", 1: "stop"}
    assert done == "[DONE]"


async def test_error_amid_a_stream_is_its_last_event(client, engine):
    engine.error, engine.num_before_error = WorkerUnavailable("compute is gone"), 2
    body = COMPLETION | {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, error = events_of(await client.post("/v1/completions", json=body))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["H", "E"]
    assert error["error"]["code"] == "unavailable"
    assert error["error"]["message"] == "compute is gone"


async def test_an_error_amid_a_stream_is_in_the_log(client, engine):
    engine.error, engine.num_before_error = WorkerUnavailable("compute is gone"), 2
    with structlog.testing.capture_logs() as logs:
        await client.post("/v1/completions", json=COMPLETION | {"stream": True})
        await client.post("/v1/completions", json={})
    (failed, refused) = [entry for entry in logs if entry["event"] == "request"]
    assert (failed["status"], failed["error"]) == (200, "unavailable")
    assert (refused["status"], "error" in refused) == (400, False)


async def test_bug_amid_a_stream_keeps_its_text_inside(client, engine):
    engine.error, engine.num_before_error = RuntimeError("secret"), 1
    response = await client.post("/v1/completions", json=COMPLETION | {"stream": True})
    assert "secret" not in response.text
    assert events_of(response)[-1]["error"]["code"] == "internal"


async def test_text_outside_ascii_arrives_whole(client):
    body = {"model": "fake/model", "prompt": "é😀 \x00 ok", "stream": True}
    *chunks, _ = events_of(await client.post("/v1/completions", json=body))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "É😀 \x00 OK"


async def test_content_parts_are_joined_and_developer_is_system(client, engine):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": parts}]
    await client.post("/v1/chat/completions", json=CHAT | {"messages": messages})
    assert bytes(engine.requests[0].prompt_ids) == b"<system>be<user>ab"


async def test_options_reach_the_engine(client, engine):
    body = COMPLETION | {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": -1,
        "stop": "x",
        "ignore_eos": True,
        "user": "someone",
        "metadata": {"a": "b"},
    }
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    [request] = engine.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p) == (0.5, 0.9)
    assert (sampling.top_k, sampling.min_p, sampling.seed) == (7, 0.1, 2**64 - 1)
    assert request.stop == ("x",)
    assert request.ignore_eos
    assert request.max_tokens == 3


async def test_options_left_out_or_null_have_their_defaults(client, engine):
    null = dict.fromkeys(
        ["max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stream"]
    )
    await client.post("/v1/chat/completions", json=CHAT)
    await client.post("/v1/chat/completions", json=CHAT | null)
    plain, explicit = engine.requests
    assert plain.sampling.temperature == explicit.sampling.temperature == 1.0
    assert plain.sampling.top_p == explicit.sampling.top_p == 1.0
    assert plain.stop == explicit.stop == ()
    assert plain.sampling.seed != explicit.sampling.seed


INERT = [
    {"n": 1},
    {"logprobs": False},
    {"logprobs": None, "top_logprobs": 0},
    {"presence_penalty": 0, "frequency_penalty": 0.0},
    {"logit_bias": {}, "repetition_penalty": 1},
    {"n": None, "num_beams": 1, "length_penalty": 1, "early_stopping": False},
    {"structured_outputs": None, "session": None, "cache_salt": None, "prompt_logprobs": None},
    {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
    {"response_format": {"type": "text"}},
    {"store": False},
    {"prompt_cache_key": "k", "safety_identifier": "u"},
    {"max_tokens": 5, "max_completion_tokens": 5},
    {"top_k": -1},
]


@pytest.mark.parametrize("extra", INERT, ids=str)
async def test_values_that_change_nothing_are_accepted(client, extra):
    response = await client.post("/v1/chat/completions", json=CHAT | extra)
    assert response.status_code == 200


async def test_answer_given_back_as_history_is_accepted(client):
    answer = (await client.post("/v1/chat/completions", json=CHAT)).json()
    said = answer["choices"][0]["message"] | {"tool_calls": None, "annotations": []}
    messages = [*CHAT["messages"], said, {"role": "user", "content": "more"}]
    response = await client.post("/v1/chat/completions", json=CHAT | {"messages": messages})
    assert response.status_code == 200


async def test_models_are_listed_and_found(client):
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["fake/model"]
    assert (await client.get("/v1/models/fake/model")).json() == listed["data"][0]
    missing = await client.get("/v1/models/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_health_tells_live_from_ready(client, engine):
    engine.ready = False
    assert (await client.get("/health/live")).status_code == 200
    response = await client.get("/health/ready")
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    engine.ready = True
    assert (await client.get("/health/ready")).status_code == 200


async def test_metrics_count_requests_tokens_and_latencies(client):
    await client.post("/v1/completions", json=COMPLETION)
    await client.post("/v1/completions", json={})
    await client.get("/v1/models/anything/at/all")
    text = (await client.get("/metrics")).text
    completed = 'quire_http_requests_total{method="POST",route="/v1/completions",status="200"} 1.0'
    assert completed in text
    assert completed.replace("200", "400") in text
    assert 'route="/v1/models/{model_id:path}",status="404"' in text
    assert "quire_prompt_tokens_total 5.0" in text
    assert "quire_generated_tokens_total 3.0" in text
    assert "quire_time_to_first_token_seconds_count 1.0" in text
    assert "quire_inter_token_latency_seconds_count 2.0" in text
    assert 'quire_generations_total{outcome="length"} 1.0' in text


async def test_metrics_tell_what_engine_and_kvstore_count(engine):
    tenant = TenantUsage("acme", 2, None, 3, 1, 1, 90, 50)
    stats = PoolStats(10, 4, 1, 5, num_prompt_tokens=100, evictions={"room": 3}, tenants=[tenant])
    up = True

    async def kv_stats():
        if not up:
            raise WorkerUnavailable("gone")
        return stats

    metrics = Metrics(kv_stats)
    frontend = Frontend(engine, metrics)
    engine.running["x"] = object()
    text = (await frontend.scrape()).decode()
    assert "quire_requests_running 1.0" in text
    assert "quire_steps_total 7.0" in text
    assert 'quire_kvstore_blocks{state="held"} 5.0' in text
    assert 'quire_kvstore_evictions_total{cause="room"} 3.0' in text
    assert 'quire_kvstore_tenant_blocks{kind="floor",tenant="acme"} 2.0' in text
    assert 'quire_kvstore_tenant_hit_tokens_total{tenant="acme"} 50.0' in text
    assert "quire_kvstore_host_blocks" not in text
    assert "quire_kvstore_up 1.0" in text
    up = False
    text = (await frontend.scrape()).decode()
    assert "quire_kvstore_blocks" not in text
    assert "quire_kvstore_up 0.0" in text
    assert "quire_steps_total 7.0" in text


async def test_request_id_is_the_clients_if_well_formed(client):
    own = await client.get("/v1/models", headers={"x-request-id": "abc-1"})
    assert own.headers["x-request-id"] == "abc-1"
    for bad in ("", "a b", "x" * 65, 'a"b'):
        made = await client.get("/v1/models", headers={"x-request-id": bad})
        assert made.headers["x-request-id"] not in ("", bad)


async def test_openapi_describes_the_bodies(client):
    document = (await client.get("/openapi.json")).json()
    body = document["paths"]["/v1/completions"]["post"]["requestBody"]
    assert body["content"]["application/json"]["schema"]["$ref"].endswith("/CompletionRequest")
    schemas = document["components"]["schemas"]
    assert "prompt" in schemas["CompletionRequest"]["properties"]
    assert "messages" in schemas["ChatRequest"]["properties"]
