"""Clients that we did not write: OpenAI's for REST, plain gRPC with reflection."""

from __future__ import annotations

import json
import re
import socket
import time

import httpx
import openai
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from quire.gateway.v1 import gateway_pb2 as pb

SERVICE = "quire.gateway.v1.GenerationService"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
FACT = "The capital of France is"


def held_blocks(url):
    [value] = re.findall(
        r'^quire_kvstore_blocks{state="held"} (\S+)$', httpx.get(f"{url}/metrics").text, re.M
    )
    return float(value)


def eventually(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


# --- OpenAI's client --------------------------------------------------------


def test_models_are_listed_and_retrieved(client, model):
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_completion_is_sensible_and_counted(client, model):
    answer = client.completions.create(model=model, prompt=FACT, max_tokens=8, temperature=0)
    assert "Paris" in answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


def test_prompts_of_one_request_answer_as_they_would_alone(client, model):
    prompts = [FACT, "def fibonacci(n):", "Roses are red,"]
    options = {"model": model, "max_tokens": 8, "temperature": 0}
    together = client.completions.create(prompt=prompts, **options)
    alone = [client.completions.create(prompt=p, **options).choices[0].text for p in prompts]
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert [choice.text for choice in together.choices] == alone


def test_chat_ends_by_itself(client, model):
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, max_completion_tokens=64, temperature=0
    )
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"


def test_stream_says_what_the_whole_answer_says(client, model):
    options = {"model": model, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_seed_fixes_the_answer(client, model):
    def answer(seed):
        options = {"model": model, "messages": QUESTION, "max_tokens": 24, "temperature": 1.5}
        return client.chat.completions.create(**options, seed=seed).choices[0].message.content

    assert answer(1) == answer(1)
    assert len({answer(seed) for seed in range(4)}) > 1


def test_repeated_prompt_is_found_in_the_cache(client, model):
    prompt = "Once upon a time, in a land far away, " * 12
    options = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    client.completions.create(**options)
    usage = client.completions.create(**options).usage
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_stop_string_ends_the_answer_and_is_not_in_it(client, model):
    options = {"model": model, "prompt": FACT, "max_tokens": 16, "temperature": 0}
    stopped = client.completions.create(**options, stop=["aris"])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text.endswith("P")


def test_bad_request_is_refused_with_its_field(client, model):
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model=model, messages=QUESTION, n=2, temperature=0)
    assert raised.value.param == "n"
    assert raised.value.code == "invalid_field"
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model=model, prompt="a " * 20_000)
    assert raised.value.code == "context_length_exceeded"
    assert client.completions.create(model=model, prompt="a", max_tokens=1)


# --- gRPC -------------------------------------------------------------------


def test_grpc_generates_what_rest_does(client, model, stub):
    request = pb.GenerateRequest(text=FACT, max_token_count=8)
    started, *deltas, finished = stub.Generate(request, timeout=60)
    answer = client.completions.create(model=model, prompt=FACT, max_tokens=8, temperature=0)
    assert started.started.model == model
    assert "".join(event.delta.text for event in deltas) == answer.choices[0].text
    assert finished.finished.completion_token_count == 8


def test_grpc_tokenizes_both_ways_and_lists_models(stub, model):
    text = "naïve 東京 👩‍👩‍👧"
    token_ids = stub.Tokenize(pb.TokenizeRequest(text=text)).token_ids
    assert stub.Detokenize(pb.DetokenizeRequest(token_ids=token_ids)).text == text
    assert [m.id for m in stub.ListModels(pb.ListModelsRequest()).models] == [model]


def test_client_without_stubs_learns_the_service_by_reflection(channel, model):
    database = ProtoReflectionDescriptorDatabase(channel)
    assert SERVICE in database.get_services()
    pool = descriptor_pool.DescriptorPool(database)
    method = pool.FindServiceByName(SERVICE).FindMethodByName("ListModels")
    request_type = message_factory.GetMessageClass(method.input_type)
    response_type = message_factory.GetMessageClass(method.output_type)
    call = channel.unary_unary(
        f"/{SERVICE}/{method.name}",
        request_serializer=request_type.SerializeToString,
        response_deserializer=response_type.FromString,
    )
    assert [m.id for m in call(request_type()).models] == [model]


def test_grpc_health_is_serving(channel):
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", SERVICE):
        status = health.Check(health_pb2.HealthCheckRequest(service=service)).status
        assert status == health_pb2.HealthCheckResponse.SERVING


# --- faults that others had --------------------------------------------------


def test_a1_no_chunk_has_half_an_emoji(client, model):
    prompt = "😀😃😄😁😆😅😂🤣" * 4
    options = {"model": model, "prompt": prompt, "max_tokens": 48, "temperature": 0}
    whole = client.completions.create(**options).choices[0].text
    chunks = client.completions.create(**options, stream=True)
    pieces = [chunk.choices[0].text for chunk in chunks]
    assert "".join(pieces) == whole
    assert any(ord(character) > 0xFFFF for character in whole)
    assert not any("\ufffd" in piece for piece in pieces[:-2])


def test_a2_stream_ends_with_reason_usage_done_in_this_order(quire_url, model):
    body = {"model": model, "messages": QUESTION, "max_tokens": 5, "stream": True}
    body["stream_options"] = {"include_usage": True}
    response = httpx.post(f"{quire_url}/v1/chat/completions", json=body, timeout=60)
    events = [event.removeprefix("data: ") for event in response.text.split("\n\n")]
    assert events[-2:] == ["[DONE]", ""]
    *chunks, usage = [json.loads(event) for event in events[:-2]]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 5
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]


@pytest.mark.parametrize("stream", [False, True])
def test_a3_closed_socket_frees_the_blocks(quire_url, model, stream):
    before = held_blocks(quire_url)
    host, port = quire_url.removeprefix("http://").split(":")
    body = {"model": model, "prompt": FACT, "max_tokens": 4096, "ignore_eos": True}
    content = json.dumps(body | {"stream": stream}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: quire\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        assert eventually(lambda: held_blocks(quire_url) > before)
        time.sleep(0.2)
    # 4096 tokens take far longer than this.
    assert eventually(lambda: held_blocks(quire_url) == before)


def test_a4_huge_body_is_refused_with_the_limit(quire_url, client, model):
    body = {"model": model, "prompt": [100] * 1_300_000, "max_tokens": 1}
    response = httpx.post(f"{quire_url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 413
    assert str(4 * 2**20) in response.json()["error"]["message"]
    assert client.completions.create(model=model, prompt="a", max_tokens=1)
