"""Decoding as applications ask for it: the openai client and gRPC against the real system."""

from __future__ import annotations

import json
import re

import grpc
import openai
import pytest
from google.protobuf import duration_pb2
from quire.common.v1 import common_pb2
from quire.gateway.v1 import gateway_pb2 as pb

QUESTION = [{"role": "user", "content": "Name a person and their age."}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
STORY = "Once upon a time there was a small village near a forest, and in it lived"


def test_several_choices_differ_and_come_again_with_their_seed(client, model):
    options = {"model": model, "prompt": STORY, "max_tokens": 12, "temperature": 0.9}
    first = client.completions.create(n=4, seed=7, **options)
    texts = [choice.text for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    again = client.completions.create(n=2, seed=7, **options)
    assert [choice.text for choice in again.choices] == texts[:2]
    other = client.completions.create(n=2, seed=8, **options)
    assert [choice.text for choice in other.choices] != texts[:2]
    assert first.usage.completion_tokens == 48
    # The prompt was computed once, and is found now.
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_the_best_of_several_is_the_likeliest(client, model):
    options = {"model": model, "prompt": STORY, "max_tokens": 10, "temperature": 1.0, "seed": 3}
    every = client.completions.create(n=4, logprobs=0, **options)
    best = client.completions.create(n=1, best_of=4, **options)

    def mean(choice):
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    assert best.choices[0].text == max(every.choices, key=mean).text


def test_streamed_choices_are_those_that_come_whole(client, model):
    options = {"model": model, "prompt": STORY, "max_tokens": 10, "temperature": 1.0, "seed": 4}
    whole = client.completions.create(n=3, **options)
    texts = {0: "", 1: "", 2: ""}
    for chunk in client.completions.create(n=3, stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [texts[n] for n in range(3)] == [choice.text for choice in whole.choices]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_schema_gives_json_that_fits_it(client, model, temperature):
    answer = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=temperature,
        seed=2,
        max_tokens=80,
        response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}},
    )
    value = json.loads(answer.choices[0].message.content)
    assert set(value) == {"name", "age"}
    assert isinstance(value["age"], int)
    assert answer.choices[0].finish_reason == "stop"


STRUCTURES = {
    "regex": ({"regex": "[0-9]{3}-[0-9]{4}"}, r"[0-9]{3}-[0-9]{4}"),
    "choice": ({"choice": ["red", "green", "blue"]}, r"red|green|blue"),
    "gbnf": ({"grammar": 'root ::= ("ab" | "cd") "!"'}, r"(ab|cd)!"),
    "lark": ({"grammar": 'start: ("x" | "y") /[0-9]{2}/'}, r"[xy][0-9]{2}"),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_are_kept_to(client, model, name):
    structure, pattern = STRUCTURES[name]
    answer = client.completions.create(
        model=model,
        prompt="Answer: ",
        max_tokens=30,
        temperature=1.0,
        extra_body={"structured_outputs": structure},
    )
    assert re.fullmatch(pattern, answer.choices[0].text)


def test_beams_come_best_first_with_their_scores(client, model):
    answer = client.completions.create(
        model=model, prompt=STORY, max_tokens=8, n=3, extra_body={"num_beams": 4}
    )
    scores = [choice.model_extra["score"] for choice in answer.choices]
    assert scores == sorted(scores, reverse=True)
    assert len({choice.text for choice in answer.choices}) == 3
    greedy = client.completions.create(
        model=model, prompt=STORY, max_tokens=8, temperature=0, logprobs=0
    )
    logprobs = greedy.choices[0].logprobs.token_logprobs
    assert scores[0] >= sum(logprobs) / len(logprobs) - 1e-3


BAD = [
    ({"n": 4, "best_of": 2, "temperature": 1}, "best_of"),
    ({"extra_body": {"num_beams": 2}, "stream": True}, "num_beams"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs"),
    ({"extra_body": {"structured_outputs": {"json": {"type": "what"}}}}, "structured_outputs"),
    ({"extra_body": {"structured_outputs": {"choice": []}}}, "structured_outputs"),
    ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty"),
    ({"extra_body": {"min_tokens": 9}, "max_tokens": 8}, "min_tokens"),
    ({"stop": ["x"] * 99}, "stop"),
    ({"top_p": 0}, "top_p"),
]


@pytest.mark.parametrize(("options", "field"), BAD)
def test_bad_options_are_refused_by_name_and_the_batch_never_notices(client, model, options, field):
    options = {"max_tokens": 16, **options}
    running = client.completions.create(
        model=model, prompt=STORY, max_tokens=24, temperature=0, stream=True
    )
    text = next(running).choices[0].text
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt=STORY, **options)
    assert caught.value.param.startswith(field)
    assert field.partition(".")[0] in caught.value.message
    text += "".join(chunk.choices[0].text for chunk in running if chunk.choices)
    whole = client.completions.create(model=model, prompt=STORY, max_tokens=24, temperature=0)
    assert text == whole.choices[0].text


# --- sessions ---------------------------------------------------------------


def _turn(stub, text, count=8, **session):
    request = pb.GenerateRequest(
        text=text,
        max_token_count=count,
        session=pb.Session(ttl=duration_pb2.Duration(seconds=60), **session),
    )
    started, *deltas, finished = stub.Generate(request, timeout=60)
    token_ids = [token for event in deltas for token in event.delta.token_ids]
    assert finished.finished.completion_token_count == len(token_ids) == count
    return started.started, token_ids


def _greedy(stub, token_ids, count=8):
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=token_ids), max_token_count=count)
    started, *deltas, _ = stub.Generate(request, timeout=60)
    return started.started, [token for event in deltas for token in event.delta.token_ids]


def _tokens(stub, text):
    return list(stub.Tokenize(pb.TokenizeRequest(text=text)).token_ids)


def test_a_turn_sends_only_its_new_tokens_and_finds_the_rest(stub):
    _, first = _turn(stub, STORY, 24, id="tale")
    history = [*_tokens(stub, STORY), *first]
    more = " Then one day"
    started, second = _turn(stub, more, id="tale", source_id="tale")
    assert started.prompt_token_count == len(history) + len(_tokens(stub, more))
    assert started.cached_token_count >= len(history) - 16
    _, expected = _greedy(stub, [*history, *_tokens(stub, more)])
    assert second == expected


def test_branches_go_on_from_any_token(stub):
    _, first = _turn(stub, STORY, 24, id="trunk")
    history = [*_tokens(stub, STORY), *first]
    for length in (3, 17, len(history) - 1):
        started, got = _turn(
            stub, " But", id=f"branch-{length}", source_id="trunk", source_token_count=length
        )
        assert started.cached_token_count >= length // 16 * 16
        _, expected = _greedy(stub, [*history[:length], *_tokens(stub, " But")])
        assert got == expected


def test_the_whole_history_over_rest_finds_a_sessions_pages(client, model):
    messages = [{"role": "user", "content": "Tell me about rivers, in a few words, please."}]
    session = {"session": {"id": "rest-chat", "ttl": 60}}
    first = client.chat.completions.create(
        model=model, messages=messages, max_tokens=24, temperature=0, extra_body=session
    )
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And lakes?"},
    ]
    second = client.chat.completions.create(
        model=model, messages=messages, max_tokens=8, temperature=0, extra_body=session
    )
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens // 16 * 16


def test_a_session_that_is_not_there_is_said_to_be(stub):
    request = pb.GenerateRequest(text="x", session=pb.Session(id="a", source_id="never"))
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request, timeout=60))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_grpc_has_what_rest_has(stub, client, model):
    request = pb.GenerateRequest(
        text=STORY,
        max_token_count=8,
        continuation_count=2,
        use_seed=True,
        sampling=common_pb2.SamplingOptions(
            temperature=0.9,
            seed=5,
            repetition_penalty=1.2,
            typical_p=0.9,
            top_logprob_count=2,
            return_logprob=True,
        ),
    )
    events = list(stub.Generate(request, timeout=60))
    texts = {0: "", 1: ""}
    for event in events:
        if event.HasField("delta"):
            texts[event.delta.index] += event.delta.text
            assert all(len(token.top) == 2 for token in event.delta.logprobs)
    answer = client.completions.create(
        model=model,
        prompt=STORY,
        max_tokens=8,
        n=2,
        temperature=0.9,
        seed=5,
        extra_body={"repetition_penalty": 1.2, "typical_p": 0.9},
    )
    assert [texts[0], texts[1]] == [choice.text for choice in answer.choices]
