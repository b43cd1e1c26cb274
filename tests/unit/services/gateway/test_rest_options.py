"""What clients get for options that change an answer's form or number."""

from __future__ import annotations

import json
import math

import pytest

from gateway.ports import Namespace, TokenLogprob
from gateway.types import (
    BeamOptions,
    Delta,
    EarlyStopping,
    Finished,
    FinishReason,
    ScoredToken,
    Started,
)

COMPLETION = {"model": "fake/model", "prompt": "hello", "max_tokens": 3}
CHAT = {"model": "fake/model", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def complete(client):
    """The choices of a completion; `whole`: all of the answer."""

    async def complete(*, whole=False, **options):
        response = await client.post("/v1/completions", json=COMPLETION | options)
        assert response.status_code == 200, response.text
        return response.json() if whole else response.json()["choices"]

    return complete


@pytest.fixture
def stream(client):
    """The choices of a stream's chunks."""

    async def stream(path, body):
        response = await client.post(path, json=body | {"stream": True})
        assert response.status_code == 200, response.text
        *lines, done, end = response.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        return [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]

    return stream


async def test_every_option_reaches_the_engine(complete, engine):
    await complete(
        n=2,
        best_of=3,
        temperature=0.5,
        typical_p=0.75,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        logit_bias={"7": -100, "0": 0.5},
        min_tokens=1,
        stop_token_ids=[5, 6],
        include_stop_str_in_output=True,
        priority=-5,
        cache_salt="pepper",
    )
    [asked] = engine.requests
    sampling = asked.sampling
    assert (asked.n, asked.best_of, asked.beams) == (2, 3, None)
    assert (sampling.typical_p, sampling.presence_penalty) == (0.75, 0.25)
    assert (sampling.frequency_penalty, sampling.repetition_penalty) == (-0.5, 1.5)
    assert sampling.logit_bias == ((7, -100), (0, 0.5))
    assert (sampling.min_tokens, sampling.stop_token_ids) == (1, (5, 6))
    assert (asked.echo_stop, asked.priority, asked.salt) == (True, -5, "pepper")
    assert not sampling.return_logprob
    assert not sampling.return_prompt_logprobs


async def test_a_beam_search_is_greedy_by_itself_and_tells_its_scores(complete, engine):
    choices = await complete(num_beams=3, n=2, length_penalty=0, early_stopping="never")
    [asked] = engine.requests
    assert asked.beams == BeamOptions(3, 0.0, EarlyStopping.NEVER)
    assert (asked.n, asked.sampling.temperature) == (2, 0.0)
    assert [choice["score"] for choice in choices] == [-0.25, -0.25]
    await complete(num_beams=2, early_stopping=True, temperature=0)
    assert engine.requests[1].beams == BeamOptions(2, 1.0, EarlyStopping.YES)


# --- several choices ------------------------------------------------------------


async def test_choices_of_several_prompts_stand_in_their_order(complete):
    answer = await complete(whole=True, prompt=["abc", "de"], n=2)
    shown = [(choice["index"], choice["text"]) for choice in answer["choices"]]
    assert shown == [(0, "ABC"), (1, "BC"), (2, "DE"), (3, "E")]
    assert answer["usage"]["prompt_tokens"] == 5  # each prompt once
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_choices_are_told_apart_in_a_stream(stream, path):
    body = COMPLETION | {"n": 2} if path == "/v1/completions" else CHAT | {"n": 2, "max_tokens": 3}
    texts, reasons = {0: "", 1: ""}, {}
    for choice in await stream(path, body):
        texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content", "")
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
    said = ("HEL", "ELL") if path == "/v1/completions" else ("<US", "USE")
    assert texts == dict(enumerate(said))
    assert reasons == {0: "length", 1: "length"}


async def test_each_choice_of_a_chat_begins_with_the_role(stream):
    choices = await stream("/v1/chat/completions", CHAT | {"n": 2})
    openings = [choice["index"] for choice in choices if "role" in choice["delta"]]
    assert openings == [0, 1]


@pytest.mark.parametrize("stop", ["END", 7, None])
async def test_what_stopped_an_answer_is_told(complete, stream, engine, stop):
    engine.stop = stop
    [choice] = await complete(max_tokens=9)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    choices = await stream("/v1/chat/completions", CHAT)
    assert [choice["stop_reason"] for choice in choices[-2:]] == [None, stop]


# --- log-probabilities ----------------------------------------------------------


async def test_completion_logprobs_have_openais_form(complete):
    [choice] = await complete(prompt="hé", max_tokens=2, logprobs=2)
    assert choice["logprobs"] == {
        # The engine's fake gives a character the token of its first byte.
        "tokens": ["H", "bytes:\\xc3"],
        "token_logprobs": [-0.072, -0.195],
        "top_logprobs": [
            {"\x00": 0.0, "\x01": -0.001, "H": -0.072},
            {"\x00": 0.0, "\x01": -0.001, "bytes:\\xc3": -0.195},
        ],
        "text_offset": [0, 1],
    }


async def test_no_others_are_beside_a_token_unless_asked_for(complete, engine):
    [choice] = await complete(max_tokens=1, logprobs=0)
    assert choice["logprobs"]["top_logprobs"] == [{"H": -0.072}]
    assert engine.requests[0].sampling.num_top_logprobs == 0
    [choice] = await complete(max_tokens=1, logprobs=1, prompt_logprobs=3)
    assert choice["logprobs"]["top_logprobs"] == [{"\x00": 0.0, "H": -0.072}]


async def test_chat_logprobs_have_openais_form(client):
    body = CHAT | {"max_tokens": 1, "logprobs": True, "top_logprobs": 1}
    [choice] = (await client.post("/v1/chat/completions", json=body)).json()["choices"]
    other = {"token": "\x00", "logprob": 0.0, "bytes": [0]}
    content = [{"token": "<", "logprob": -0.06, "bytes": [60], "top_logprobs": [other]}]
    assert choice["logprobs"] == {"content": content, "refusal": None}


async def test_a_stream_has_the_same_logprobs_piece_by_piece(complete, stream, client):
    body = COMPLETION | {"logprobs": 1, "echo": True}
    [choice] = await complete(logprobs=1, echo=True)
    chunks = await stream("/v1/completions", body)
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"] == "helloHEL"
    for key, values in choice["logprobs"].items():
        assert [one for c in chunks if c["logprobs"] for one in c["logprobs"][key]] == values
    body = CHAT | {"logprobs": True, "top_logprobs": 2}
    [choice] = (await client.post("/v1/chat/completions", json=body)).json()["choices"]
    chunks = await stream("/v1/chat/completions", body)
    content = [one for c in chunks if c["logprobs"] for one in c["logprobs"]["content"]]
    assert content == choice["logprobs"]["content"]


async def test_scores_without_text_yet_are_sent_too(stream, engine):
    async def generate(request):
        yield Started("r", 1, 0)
        yield Delta("", [195], [ScoredToken(195, -0.5)])
        yield Delta("é", [169], [ScoredToken(169, -0.25)])
        yield Finished(FinishReason.STOP, 2)

    engine.generate = generate
    first, second, _ = await stream("/v1/completions", COMPLETION | {"logprobs": 0})
    assert (first["text"], first["logprobs"]["token_logprobs"]) == ("", [-0.5])
    assert (second["text"], second["logprobs"]["text_offset"]) == ("é", [0])


async def test_what_is_impossible_is_still_a_number_in_json(complete, engine):
    async def generate(request):
        yield Started("r", 1, 0)
        yield Delta("a", [97], [ScoredToken(97, -math.inf, (TokenLogprob(98, -math.inf),))])
        yield Finished(FinishReason.STOP, 1)

    engine.generate = generate
    [choice] = await complete(logprobs=1)
    assert choice["logprobs"]["token_logprobs"] == [-9999.0]


# --- prompts --------------------------------------------------------------------


async def test_echo_begins_with_the_prompt(complete, stream):
    [choice] = await complete(echo=True)
    assert (choice["text"], choice["logprobs"]) == ("helloHEL", None)
    [choice] = await complete(echo=True, prompt=[104, 105], max_tokens=1)
    assert choice["text"] == "hiH"
    choices = await complete(echo=True, n=2)
    assert [choice["text"] for choice in choices] == ["helloHEL", "helloELL"]
    chunks = await stream("/v1/completions", COMPLETION | {"echo": True, "n": 2})
    assert [(c["index"], c["text"]) for c in chunks[:2]] == [(0, "hello"), (1, "hello")]


async def test_echo_with_logprobs_scores_the_prompt_but_for_its_first_token(complete):
    [choice] = await complete(prompt="é!", echo=True, logprobs=0, max_tokens=1)
    assert choice["text"] == "é!É"
    assert choice["logprobs"] == {
        "tokens": ["bytes:\\xc3", "bytes:\\xa9", "!", "bytes:\\xc3"],
        "token_logprobs": [None, -0.169, -0.033, -0.195],
        "top_logprobs": [None, {"bytes:\\xa9": -0.169}, {"!": -0.033}, {"bytes:\\xc3": -0.195}],
        "text_offset": [0, 0, 1, 2],
    }


async def test_c9_a_prompt_is_scored_the_same_each_time(complete):
    options = {"prompt": list(range(33)), "echo": True, "logprobs": 1, "max_tokens": 1}
    (first,), (second,) = [await complete(**options) for _ in range(2)]
    assert first == second
    scores = first["logprobs"]["token_logprobs"]
    assert len(scores) == 33 + 1
    assert scores[0] is None
    assert None not in scores[1:]


@pytest.mark.parametrize("stream_it", [False, True])
async def test_no_token_at_all_can_be_asked_for_with_echo(complete, stream, stream_it):
    options = {"echo": True, "max_tokens": 0, "logprobs": 1}
    if stream_it:
        *_, opening, closing = await stream("/v1/completions", COMPLETION | options)
        assert opening["text"] == "hello"
        assert closing["finish_reason"] == "length"
        return
    answer = await complete(whole=True, **options)
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hello", "length")
    assert len(choice["logprobs"]["tokens"]) == 5
    assert answer["usage"]["completion_tokens"] == 0


async def test_prompt_logprobs_have_vllms_form(complete, client):
    [choice] = await complete(prompt="a\x00", prompt_logprobs=1)
    null, entries = choice["prompt_logprobs"]
    assert null is None
    assert entries == {"0": {"logprob": 0.0, "rank": 1, "decoded_token": "\x00"}}
    assert choice["logprobs"] is None
    body = CHAT | {"prompt_logprobs": 1}
    answer = (await client.post("/v1/chat/completions", json=body)).json()
    scores = answer["prompt_logprobs"]
    assert len(scores) == answer["usage"]["prompt_tokens"]
    own = {"logprob": -0.117, "rank": None, "decoded_token": "u"}
    assert scores[1] == {"117": own, "0": {"logprob": 0.0, "rank": 1, "decoded_token": "\x00"}}


# --- structures and sessions ----------------------------------------------------

SCHEMA = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}}


@pytest.mark.parametrize(
    ("options", "grammar"),
    [
        ({"response_format": {"type": "json_object"}}, 'json_schema {"type":"object"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            f"json_schema {json.dumps(SCHEMA)}",
        ),
        ({"structured_outputs": {"json": SCHEMA}}, f"json_schema {json.dumps(SCHEMA)}"),
        ({"structured_outputs": {"json": "{}"}}, "json_schema {}"),
        ({"structured_outputs": {"json_object": True}}, 'json_schema {"type":"object"}'),
        ({"structured_outputs": {"regex": "a+"}}, "regex a+"),
        ({"structured_outputs": {"choice": ["a", "é"]}}, 'choice ["a", "é"]'),
        ({"structured_outputs": {"grammar": "start: A"}}, "grammar start: A"),
        ({"response_format": {"type": "text"}, "structured_outputs": {"regex": "a"}}, "regex a"),
        ({"response_format": {"type": "text"}}, ""),
    ],
    ids=str,
)
async def test_structures_reach_the_engine_compiled(complete, engine, options, grammar):
    await complete(**options)
    assert engine.requests[0].sampling.grammar == grammar


async def test_a_session_pins_prompt_and_first_answer(client, engine, frontend):
    body = CHAT | {"session": {"id": "s", "ttl": 60}, "n": 2, "cache_salt": "pepper"}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    await frontend._sessions.settle()
    [plan] = engine.pins.values()
    assert bytes(plan.token_ids) == b"<user>hi<USER>HI"
    assert plan.namespace == Namespace(engine.model.fingerprint, salt="pepper")
    assert plan.ttl_seconds == 60
    assert "quire_sessions 1.0" in (await client.get("/metrics")).text


async def test_a_prompt_that_is_scored_is_kept_without_a_pin(complete, engine, frontend):
    await complete(session={"id": "s"}, prompt_logprobs=0)
    await frontend._sessions.settle()
    assert not engine.pins


async def test_metrics_count_the_tokens_of_all_choices(client, complete):
    await complete(n=2, structured_outputs={"regex": "a"})
    text = (await client.get("/metrics")).text
    assert "quire_generated_tokens_total 6.0" in text
    assert "quire_prompt_tokens_total 5.0" in text
    assert "quire_time_to_first_token_seconds_count 1.0" in text
    assert "quire_inter_token_latency_seconds_count 4.0" in text
    assert 'quire_generations_total{outcome="length"} 1.0' in text
    assert 'quire_grammars_total{outcome="accepted"} 1.0' in text


async def test_openapi_describes_the_new_options(client):
    schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
    completion, chat = schemas["CompletionRequest"], schemas["ChatRequest"]
    for name in ("n", "logit_bias", "prompt_logprobs", "num_beams", "priority", "min_tokens"):
        assert completion["properties"][name]["description"]
        assert chat["properties"][name]["description"]
    assert {"best_of", "echo"} <= completion["properties"].keys()
    assert "json" in schemas["StructuredOutputs"]["properties"]
    assert "schema" in schemas["JsonSchemaFormat"]["properties"]
    assert schemas["Session"]["required"] == ["id"]
