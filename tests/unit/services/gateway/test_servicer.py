"""GenerationService over a real socket."""

from __future__ import annotations

import asyncio
import math

import grpc
import pytest
from quire.common.v1 import common_pb2
from quire.gateway.v1 import gateway_pb2 as pb

from gateway.errors import QueueFull
from tests.unit.services.gateway.grpc_calls import chat, events_of, refusal_of

sampling = common_pb2.SamplingOptions
DRAWN = sampling(temperature=1)
BIASES = sampling(logit_bias=[common_pb2.LogitBias(token_id=5)] * 2)
TWO_BEAMS = pb.BeamOptions(beam_count=2)
OBJECT = pb.Structure(json_object=True)
EMPTY_CHOICE = pb.Structure(choice=pb.Choices(texts=["a", ""]))
GOING_ON = pb.Session(id="s", source_id="s")
LENGTH_PENALTY, EARLY_STOPPING = "beams.length_penalty", "beams.early_stopping"
SOURCE_TOKENS = "session.source_token_count"


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ({"text": "hé😀"}, "HÉ😀"),
        ({"token_ids": pb.TokenIds(ids=[97, 98])}, "AB"),
        ({"chat": chat(("system", "a"), ("user", "b"))}, "<SYSTEM>A<USER>B"),
    ],
)
async def test_generate_starts_streams_and_finishes(stub, prompt, text):
    request = pb.GenerateRequest(model="fake/model", request_id="my-1", **prompt)
    first, *deltas, last = await events_of(stub.Generate(request))
    assert first.started.request_id == "my-1"
    assert first.started.model == "fake/model"
    assert first.started.prompt_token_count == len(text.encode())
    assert first.started.cached_token_count == 16
    assert "".join(event.delta.text for event in deltas) == text
    assert all(event.delta.token_ids for event in deltas)
    assert last.finished.finish_reason == pb.FINISH_REASON_STOP
    assert last.finished.completion_token_count == len(text)


async def test_unset_fields_have_the_contracts_defaults(stub, engine):
    for _ in range(2):
        await events_of(stub.Generate(pb.GenerateRequest(text="a")))
    first, second = engine.requests
    assert first.max_tokens is None
    assert first.sampling.temperature == 0.0
    assert first.sampling.top_p == 1.0
    assert first.sampling.seed != second.sampling.seed
    assert first.request_id != second.request_id


async def test_options_reach_the_engine(stub, engine):
    sampling = common_pb2.SamplingOptions(
        temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, seed=9, return_logprob=True
    )
    request = pb.GenerateRequest(
        text="abc",
        max_token_count=2,
        sampling=sampling,
        use_seed=True,
        stop=["x"],
        ignore_eos=True,
    )
    *_, last = await events_of(stub.Generate(request))
    assert last.finished.finish_reason == pb.FINISH_REASON_LENGTH
    [asked] = engine.requests
    assert (asked.sampling.temperature, asked.sampling.top_k) == (0.5, 3)
    assert (asked.sampling.top_p, asked.sampling.min_p) == (0.25, 0.125)
    assert asked.sampling.seed == 9
    assert asked.sampling.return_logprob
    assert asked.stop == ("x",)
    assert asked.ignore_eos


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "prompt"),
        ({"chat": chat()}, "chat.messages"),
        ({"chat": chat(("user", "a"), ("king", "b"))}, "chat.messages[1].role"),
        ({"text": "a", "max_token_count": -1}, "max_token_count"),
        ({"text": "a", "request_id": "a b"}, "request_id"),
        ({"text": "a", "request_id": "a" * 65}, "request_id"),
        (
            {"text": "a", "sampling": common_pb2.SamplingOptions(sequence_index=1)},
            "sampling.sequence_index",
        ),
        ({"token_ids": pb.TokenIds(ids=[999])}, "token_ids"),
        ({"text": "a" * 600}, "text"),
        ({"text": ""}, "text"),
        ({"chat": chat(("user", "a" * 600))}, "chat.messages"),
        ({"text": "a", "max_token_count": 2**31 - 1}, "max_token_count"),
        (
            {"text": "a", "sampling": common_pb2.SamplingOptions(temperature=math.nan)},
            "sampling.temperature",
        ),
        ({"text": "a", "sampling": common_pb2.SamplingOptions(top_p=-1)}, "sampling.top_p"),
        ({"text": "a", "stop": [""]}, "stop[0]"),
        ({"text": "a", "continuation_count": -1}, "continuation_count"),
        ({"text": "a", "continuation_count": 2}, "continuation_count"),
        ({"text": "a", "continuation_count": 65, "sampling": DRAWN}, "continuation_count"),
        ({"text": "a", "best_of_count": -1}, "best_of_count"),
        ({"text": "a", "continuation_count": 3, "best_of_count": 2}, "best_of_count"),
        ({"text": "a", "beams": pb.BeamOptions(beam_count=1)}, "beams.beam_count"),
        ({"text": "a", "beams": pb.BeamOptions(beam_count=2, length_penalty=11)}, LENGTH_PENALTY),
        ({"text": "a", "beams": pb.BeamOptions(beam_count=2, early_stopping=9)}, EARLY_STOPPING),
        ({"text": "a", "beams": TWO_BEAMS, "sampling": DRAWN}, "sampling.temperature"),
        ({"text": "a", "beams": TWO_BEAMS, "stop": ["x"]}, "stop"),
        ({"text": "a", "beams": TWO_BEAMS, "best_of_count": 2}, "best_of_count"),
        ({"text": "a", "beams": TWO_BEAMS, "structure": OBJECT}, "structure.json_object"),
        ({"text": "a", "priority": 101}, "priority"),
        ({"text": "a", "cache_salt": "s" * 129}, "cache_salt"),
        ({"text": "a", "sampling": sampling(typical_p=2)}, "sampling.typical_p"),
        ({"text": "a", "sampling": sampling(repetition_penalty=-1)}, "sampling.repetition_penalty"),
        ({"text": "a", "sampling": sampling(frequency_penalty=3)}, "sampling.frequency_penalty"),
        ({"text": "a", "sampling": sampling(presence_penalty=-3)}, "sampling.presence_penalty"),
        ({"text": "a", "sampling": sampling(min_token_count=-1)}, "sampling.min_token_count"),
        ({"text": "a", "sampling": sampling(stop_token_ids=[256])}, "sampling.stop_token_ids[0]"),
        ({"text": "a", "sampling": sampling(top_logprob_count=1)}, "sampling.top_logprob_count"),
        ({"text": "a", "sampling": BIASES}, "sampling.logit_bias[1].token_id"),
        ({"text": "a", "structure": pb.Structure()}, "structure"),
        ({"text": "a", "structure": pb.Structure(json_object=False)}, "structure.json_object"),
        ({"text": "a", "structure": pb.Structure(regex="bad")}, "structure.regex"),
        ({"text": "a", "structure": pb.Structure(grammar="bad")}, "structure.grammar"),
        ({"text": "a", "structure": pb.Structure(choice=pb.Choices())}, "structure.choice.texts"),
        ({"text": "a", "structure": EMPTY_CHOICE}, "structure.choice.texts[1]"),
        ({"text": "a", "structure": OBJECT, "ignore_eos": True}, "ignore_eos"),
        ({"text": "a", "session": pb.Session()}, "session.id"),
        ({"text": "a", "session": pb.Session(id="s", ttl={"nanos": 5})}, "session.ttl"),
        ({"text": "a", "session": pb.Session(id="s", source_token_count=1)}, SOURCE_TOKENS),
        ({"chat": chat(("user", "a")), "session": GOING_ON}, "session.source_id"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_bad_field_is_named_and_nothing_runs(stub, engine, fields, field):
    status = await refusal_of(stub.Generate(pb.GenerateRequest(**fields)))
    assert status.code is grpc.StatusCode.INVALID_ARGUMENT
    assert status.metadata["field"] == field
    assert not engine.running
    assert await events_of(stub.Generate(pb.GenerateRequest(text="a")))


async def test_unknown_model_is_not_found(stub):
    status = await refusal_of(stub.Generate(pb.GenerateRequest(model="other", text="a")))
    assert status.code is grpc.StatusCode.NOT_FOUND
    assert status.reason == "MODEL_NOT_FOUND"


async def test_full_queue_says_when_to_retry(stub, engine):
    engine.error = QueueFull(limit=4, retry_after=1.5)
    status = await refusal_of(stub.Generate(pb.GenerateRequest(text="a")))
    assert status.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert status.retry_after == 1.5


async def test_bug_has_a_fixed_text(stub, engine):
    engine.error = RuntimeError("secret")
    status = await refusal_of(stub.Generate(pb.GenerateRequest(text="a")))
    assert status.code is grpc.StatusCode.INTERNAL
    assert "secret" not in status.message


async def test_cancelling_the_call_closes_the_generation(stub, engine, until):
    engine.gate.clear()
    call = stub.Generate(pb.GenerateRequest(text="abc"))
    assert (await call.read()).started.prompt_token_count == 3
    call.cancel()
    await until(lambda: not engine.running)
    assert engine.endings == {"closed": 1}


async def test_cancelling_a_call_that_nobody_reads_closes_the_generation(stub, engine, until):
    # Enough text to fill the transport, so that the servicer stands in a send.
    engine.tokenizer.decode = lambda token_ids: "x" * 1_000_000
    call = stub.Generate(pb.GenerateRequest(text="abc"))
    await call.read()
    await asyncio.sleep(0.05)
    assert len(engine.running) == 1
    call.cancel()
    await until(lambda: not engine.running)
    assert engine.endings == {"closed": 1}


async def test_deadline_closes_the_generation(stub, engine, until):
    engine.gate.clear()
    call = stub.Generate(pb.GenerateRequest(text="abc"), timeout=0.2)
    status = await refusal_of(call)
    assert status.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: not engine.running)


async def test_cancel_generation_finishes_with_cancelled(stub, engine):
    engine.gate.clear()
    call = stub.Generate(pb.GenerateRequest(text="abc", request_id="r"))
    await call.read()
    await stub.CancelGeneration(pb.CancelGenerationRequest(request_id="r"))
    last = await call.read()
    assert last.finished.finish_reason == pb.FINISH_REASON_CANCELLED
    assert await call.read() is grpc.aio.EOF
    status = await refusal_of(stub.CancelGeneration(pb.CancelGenerationRequest(request_id="r")))
    assert status.code is grpc.StatusCode.NOT_FOUND
    assert status.reason == "REQUEST_NOT_FOUND"


async def test_tokenize_and_detokenize_are_inverse(stub):
    tokens = (await stub.Tokenize(pb.TokenizeRequest(text="hé"))).token_ids
    assert list(tokens) == list("hé".encode())
    assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens))).text == "hé"
    rendered = await stub.Tokenize(pb.TokenizeRequest(chat=chat(("user", "a"))))
    assert bytes(rendered.token_ids) == b"<user>a"


async def test_tokenize_without_input_and_foreign_tokens_are_refused(stub):
    status = await refusal_of(stub.Tokenize(pb.TokenizeRequest()))
    assert status.metadata["field"] == "input"
    for token_id in (-1, 256):
        status = await refusal_of(stub.Detokenize(pb.DetokenizeRequest(token_ids=[token_id])))
        assert status.code is grpc.StatusCode.INVALID_ARGUMENT
        assert status.metadata["field"] == "token_ids"


async def test_lists_that_take_long_to_look_through_are_refused_by_their_length(stub):
    """Whoever reads them does so on the event loop, where every stream would wait."""
    status = await refusal_of(stub.Detokenize(pb.DetokenizeRequest(token_ids=[0] * 513)))
    assert status.metadata["field"] == "token_ids"
    assert "512 entries, not 513" in status.message
    biases = [common_pb2.LogitBias(token_id=1)] * 1025
    many = pb.GenerateRequest(text="a", sampling=common_pb2.SamplingOptions(logit_bias=biases))
    status = await refusal_of(stub.Generate(many))
    assert status.metadata["field"] == "sampling.logit_bias"
    talk = chat(*[("user", "")] * 4097)
    for call in (
        stub.Generate(pb.GenerateRequest(chat=talk)),
        stub.Tokenize(pb.TokenizeRequest(chat=talk)),
    ):
        status = await refusal_of(call)
        assert status.metadata["field"] == "chat.messages"


async def test_models_are_listed(stub):
    [model] = (await stub.ListModels(pb.ListModelsRequest())).models
    assert (model.id, model.max_sequence_length) == ("fake/model", 512)


@pytest.mark.parametrize("place", ["request", "sampling"])
async def test_a_field_of_a_later_version_is_refused(stub, engine, place):
    """It might change the answer."""
    request = pb.GenerateRequest(text="hello", sampling=common_pb2.SamplingOptions(top_k=5))
    unknown = b"\xf8\x3f\x01"  # field 1023, the number 1
    target = request if place == "request" else request.sampling
    target.MergeFromString(unknown)
    status = await refusal_of(stub.Generate(request))
    assert (status.code, status.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "UNKNOWN_FIELD")
    assert "1023" in status.message
    assert not engine.requests


async def test_cancelling_nothing_is_refused(stub):
    status = await refusal_of(stub.CancelGeneration(pb.CancelGenerationRequest()))
    assert status.metadata["field"] == "request_id"


@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
async def test_bytes_that_are_no_message_are_refused_in_one_word(channel, caplog, method):
    path = f"/quire.gateway.v1.GenerationService/{method}"
    kind = channel.unary_stream if method == "Generate" else channel.unary_unary
    status = await refusal_of(kind(path)(b"\xff\xff\xff"))
    assert (status.code, status.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert "Traceback" not in caplog.text
