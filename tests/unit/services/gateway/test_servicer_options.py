"""Options of GenerationService, and what they add to an answer."""

from __future__ import annotations

import grpc
import pytest
from quire.common.v1 import common_pb2
from quire.gateway.v1 import gateway_pb2 as pb

from gateway.errors import PinRefused
from gateway.ports import Namespace, TokenLogprob
from gateway.types import (
    BeamOptions,
    Delta,
    EarlyStopping,
    Finished,
    FinishReason,
    PromptScored,
    ScoredToken,
    Started,
)
from tests.unit.services.gateway.grpc_calls import events_of, refusal_of

sampling = common_pb2.SamplingOptions
DRAWN = sampling(temperature=1)
TWO_BEAMS = pb.BeamOptions(beam_count=2)
GOING_ON = pb.Session(id="s", source_id="s")


async def test_every_option_reaches_the_engine(stub, engine):
    options = sampling(
        temperature=0.5,
        typical_p=0.75,
        repetition_penalty=1.5,
        frequency_penalty=-0.5,
        presence_penalty=0.25,
        logit_bias=[common_pb2.LogitBias(token_id=7, bias=-100)],
        min_token_count=1,
        stop_token_ids=[5, 6],
        return_prompt_logprobs=True,
        top_logprob_count=3,
    )
    request = pb.GenerateRequest(
        text="abc",
        sampling=options,
        continuation_count=2,
        best_of_count=3,
        include_stop=True,
        priority=-5,
        cache_salt="pepper",
    )
    await events_of(stub.Generate(request))
    [asked] = engine.requests
    assert asked.sampling.typical_p == 0.75
    assert asked.sampling.repetition_penalty == 1.5
    assert asked.sampling.frequency_penalty == -0.5
    assert asked.sampling.presence_penalty == 0.25
    assert asked.sampling.logit_bias == ((7, -100.0),)
    assert (asked.sampling.min_tokens, asked.sampling.stop_token_ids) == (1, (5, 6))
    assert asked.sampling.return_prompt_logprobs
    assert not asked.sampling.return_logprob
    assert asked.sampling.num_top_logprobs == 3
    assert (asked.n, asked.best_of, asked.beams) == (2, 3, None)
    assert (asked.echo_stop, asked.priority) == (True, -5)
    assert asked.salt == "pepper"


async def test_beams_and_structures_reach_the_engine(stub, engine, compiler):
    beams = pb.BeamOptions(beam_count=3, length_penalty=0, early_stopping=pb.EARLY_STOPPING_NEVER)
    *_, last = await events_of(stub.Generate(pb.GenerateRequest(text="abc", beams=beams)))
    assert last.finished.score == -0.25
    plain = pb.GenerateRequest(text="abc", beams=TWO_BEAMS)
    await events_of(stub.Generate(plain))
    first, second = (request.beams for request in engine.requests)
    assert first == BeamOptions(3, 0.0, EarlyStopping.NEVER)
    assert second == BeamOptions(2, 1.0, EarlyStopping.NO)
    for form in (
        {"json_schema": "{}"},
        {"json_object": True},
        {"regex": "a+"},
        {"choice": pb.Choices(texts=["a", "b"])},
        {"grammar": 'root ::= "a"'},
    ):
        structure = pb.Structure(**form)
        await events_of(stub.Generate(pb.GenerateRequest(text="abc", structure=structure)))
    grammars = [request.sampling.grammar for request in engine.requests[2:]]
    assert grammars == [
        "json_schema {}",
        'json_schema {"type":"object"}',
        "regex a+",
        'choice ["a", "b"]',
        'grammar root ::= "a"',
    ]


async def test_each_continuation_has_its_deltas_and_its_end(stub, engine):
    engine.stop = "x"
    request = pb.GenerateRequest(text="abc", continuation_count=2, sampling=DRAWN)
    first, *rest = await events_of(stub.Generate(request))
    assert first.HasField("started")
    texts, ends = {0: "", 1: ""}, []
    for event in rest:
        if event.HasField("delta"):
            texts[event.delta.index] += event.delta.text
        else:
            ends.append(event.finished)
    assert texts == {0: "ABC", 1: "BC"}
    assert [(end.index, end.completion_token_count) for end in ends] == [(0, 3), (1, 2)]
    assert all(end.stop_text == "x" and not end.HasField("score") for end in ends)
    engine.stop = 0
    *_, last = await events_of(stub.Generate(pb.GenerateRequest(text="abc")))
    assert last.finished.WhichOneof("stop_reason") == "stop_token_id"


async def test_tokens_are_scored_with_their_bytes(stub):
    options = sampling(return_logprob=True, return_prompt_logprobs=True, top_logprob_count=2)
    events = await events_of(stub.Generate(pb.GenerateRequest(text="ab", sampling=options)))
    _, prompt, first, *_ = events
    [scored] = prompt.prompt_scored.tokens
    assert (scored.token.token_id, scored.token.token_bytes) == (98, b"b")
    assert scored.token.logprob == pytest.approx(-0.098)
    assert [(one.token_id, one.token_bytes) for one in scored.top] == [(0, b"\0"), (1, b"\1")]
    [scored] = first.delta.logprobs
    assert list(first.delta.token_ids) == [scored.token.token_id] == [65]


async def test_long_scores_and_texts_come_in_messages_that_arrive(stub, engine, until):
    """Fault A4: 8,192 tokens with 20 others each, in one event of the engine."""
    top = tuple(TokenLogprob(token, -1.0) for token in range(20))
    scores = [ScoredToken(index % 256, -float(index), top) for index in range(8192)]
    text = "é" * 3_000_000
    ids = [one.token_id for one in scores]

    async def generate(request):
        yield Started("r", 1, 0)
        yield PromptScored(scores)
        yield Delta(text, ids, scores, 1)
        yield Finished(FinishReason.STOP, 8192)

    engine.generate = generate
    engine.tokenizer.token_bytes = lambda token_id: b"x" * 40
    events = await events_of(stub.Generate(pb.GenerateRequest(text="a")))
    assert max(event.ByteSize() for event in events) < 2 * 2**20
    prompt = [one.token.logprob for event in events for one in event.prompt_scored.tokens]
    assert prompt == [one.logprob for one in scores]
    deltas = [event.delta for event in events if event.HasField("delta")]
    assert "".join(delta.text for delta in deltas) == text
    assert [token for delta in deltas for token in delta.token_ids] == ids
    assert [one.token.logprob for delta in deltas for one in delta.logprobs] == prompt
    assert {delta.index for delta in deltas} == {1}
    assert all(len(delta.token_ids) == len(delta.logprobs) for delta in deltas)


async def test_the_next_turn_of_a_session_sends_only_what_is_new(stub, engine, frontend):
    session = pb.Session(id="s", ttl={"seconds": 60})
    request = pb.GenerateRequest(text="ab", session=session, cache_salt="pepper")
    await events_of(stub.Generate(request))
    session = pb.Session(id="s", source_id="s")
    first, *_ = await events_of(stub.Generate(pb.GenerateRequest(text="c", session=session)))
    assert bytes(engine.requests[-1].prompt_ids) == b"abABc"
    assert first.started.prompt_token_count == 5
    branch = pb.Session(id="t", source_id="s", source_token_count=3)
    tokens = pb.TokenIds(ids=[100])
    await events_of(stub.Generate(pb.GenerateRequest(token_ids=tokens, session=branch)))
    assert bytes(engine.requests[-1].prompt_ids) == b"abAd"
    await frontend._sessions.settle()
    kept, branch = engine.pins.values()
    assert bytes(kept.token_ids) == b"abABcABABC"
    assert bytes(branch.token_ids) == b"abAdABAD"
    assert kept.namespace == Namespace(engine.model.fingerprint)
    assert (kept.ttl_seconds, branch.ttl_seconds) == (600, 600)


async def test_a_sessions_pin_is_in_the_namespace_of_its_request(stub, engine, frontend):
    request = pb.GenerateRequest(text="ab", session=pb.Session(id="s"), cache_salt="pepper")
    await events_of(stub.Generate(request))
    await frontend._sessions.settle()
    [plan] = engine.pins.values()
    assert plan.namespace == Namespace(engine.model.fingerprint, salt="pepper")


async def test_a_session_has_one_turn_at_a_time(stub, engine, until):
    engine.gate.clear()
    request = pb.GenerateRequest(text="ab", session=pb.Session(id="s"))
    call = stub.Generate(request)
    await call.read()
    status = await refusal_of(stub.Generate(request))
    assert (status.code, status.reason) == (grpc.StatusCode.ALREADY_EXISTS, "SESSION_BUSY")
    call.cancel()
    await until(lambda: not engine.running)
    engine.gate.set()
    going_on = pb.GenerateRequest(text="ab", session=GOING_ON)
    status = await refusal_of(stub.Generate(going_on))  # the turn that was cut left nothing
    assert (status.code, status.reason) == (grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND")
    await events_of(stub.Generate(request))
    await events_of(stub.Generate(going_on))


async def test_a_pin_that_is_refused_fails_nothing(stub, engine, frontend):
    engine.pin_error = PinRefused("no room")
    request = pb.GenerateRequest(text="ab", session=pb.Session(id="s"))
    *_, last = await events_of(stub.Generate(request))
    assert last.finished.finish_reason == pb.FINISH_REASON_STOP
    await events_of(stub.Generate(pb.GenerateRequest(text="c", session=GOING_ON)))
    assert bytes(engine.requests[-1].prompt_ids) == b"abABc"
    await frontend._sessions.settle()
    assert b'quire_session_pins_total{outcome="refused"} 2.0' in await frontend.scrape()


async def test_a_turn_needs_a_prompt_of_its_own(stub):
    request = pb.GenerateRequest(text="ab", session=pb.Session(id="s"))
    await events_of(stub.Generate(request))
    status = await refusal_of(stub.Generate(pb.GenerateRequest(text="", session=GOING_ON)))
    assert status.metadata["field"] == "text"


@pytest.mark.parametrize("nanos", [-1, 10**9])
async def test_a_ttl_that_is_no_duration_is_refused(stub, nanos):
    session = pb.Session(id="s")
    session.ttl.seconds, session.ttl.nanos = 5, nanos
    status = await refusal_of(stub.Generate(pb.GenerateRequest(text="a", session=session)))
    assert status.code is grpc.StatusCode.INVALID_ARGUMENT
    assert status.metadata["field"] == "session.ttl"
