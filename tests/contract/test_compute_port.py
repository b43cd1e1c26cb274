"""gateway.ports.Compute and StepStream: the same behaviour in a thread and over gRPC."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from compute import types as ct
from compute.errors import InvalidStep, LayoutMismatch, PoolUnavailable
from gateway import ports
from gateway.errors import StepRefused, WorkerUnavailable
from gateway.ports import BlockCopy, Chunk, SamplingOptions, SequenceState, Step, TableExtension
from services.gateway.compute_clients import GrpcCompute


def next_token(token_ids) -> int:
    return (sum(token_ids) * 31 + len(token_ids)) % 97


def first_step(step_id: int, *tokens: int, sequence_id: str = "a") -> Step:
    state = SequenceState(sequence_id, tokens, [3, 1], SamplingOptions(seed=2**63))
    return Step(
        step_id, sequences=[state], chunks=[Chunk(sequence_id, 0, len(tokens), sample=True)]
    )


def decode_step(step_id: int, start: int, sequence_id: str = "a") -> Step:
    return Step(step_id, chunks=[Chunk(sequence_id, start, 1, sample=True)])


async def until(condition) -> None:
    """Wait for what happens in another thread or task; the test's timeout bounds it."""
    while not condition():  # noqa: ASYNC110 - a thread cannot set an asyncio.Event
        await asyncio.sleep(0.005)


async def test_describes_the_model_and_its_pool(compute):
    assert await compute.client.get_model() == ports.ModelInfo(
        model_id="fake",
        fingerprint=b"f" * 32,
        vocab_size=97,
        max_sequence_length=512,
        pool=ports.PoolInfo(block_size=8, num_blocks=8, generation=1),
    )


async def test_a_step_travels_whole(compute, monkeypatch):
    seen = []
    run = compute.runner.run
    monkeypatch.setattr(compute.runner, "run", lambda step: seen.append(step) or run(step))
    stream = await compute.client.open_stream()
    sampling = SamplingOptions(
        temperature=0.5,
        top_k=40,
        top_p=0.75,
        min_p=0.125,
        typical_p=0.875,
        repetition_penalty=1.25,
        frequency_penalty=-0.5,
        presence_penalty=1.5,
        logit_bias=((3, -100.0), (4, 0.5)),
        min_tokens=9,
        stop_token_ids=(2, 0),
        grammar='{"grammars": []}',
        seed=2**64 - 1,
        sequence_index=3,
        return_logprob=True,
        return_prompt_logprobs=True,
        num_top_logprobs=20,
        num_candidates=6,
    )
    defaults = {field.name: field.default for field in dataclasses.fields(SamplingOptions)}
    assert all(getattr(sampling, name) != default for name, default in defaults.items())
    step = Step(
        step_id=7,
        closed=["old"],
        sequences=[SequenceState("a", [1, 2, 3], [4, 5], sampling, num_prompt_tokens=2)],
        extensions=[TableExtension("a", 2, [6])],
        copies=[BlockCopy(7, 9)],
        chunks=[Chunk("a", 0, 3, True, (8, 7), 1)],
    )
    await stream.submit(step)
    result = await stream.result()
    assert result.step_id == 7
    assert result.elapsed == 0.25
    assert [(t.sequence_id, t.token_id, t.logprob) for t in result.tokens] == [
        ("a", next_token([1, 2, 3]), -0.5)
    ]
    (arrived,) = seen
    sent, found = dataclasses.asdict(step), dataclasses.asdict(arrived)
    del sent["sequences"][0]["request_id"]  # the log's, not the runner's
    del sent["copies"]  # of another kind on each side
    assert found.pop("copies") == [{"source": 7, "target": 9}]
    assert found == sent
    await stream.close()


async def test_the_defaults_arrive_as_such(compute, monkeypatch):
    seen = []
    run = compute.runner.run
    monkeypatch.setattr(compute.runner, "run", lambda step: seen.append(step) or run(step))
    stream = await compute.client.open_stream()
    state = SequenceState("a", [1], [4], SamplingOptions())
    await stream.submit(Step(1, sequences=[state], chunks=[Chunk("a", 0, 1, sample=True)]))
    await stream.result()
    assert seen[0].sequences[0].sampling == ct.SamplingOptions()
    assert seen[0].chunks[0] == ct.Chunk("a", 0, 1, sample=True)
    await stream.close()


async def test_a_result_travels_whole(compute, monkeypatch):
    """Several tokens of a sequence, candidates, the prompt's scores, failures."""
    top = ((5, -0.25), (6, -1.5))
    told = {
        "tokens": [("a", 5, -0.25, top), ("a", 7, None, ())],
        "candidates": [("b", top)],
        "prompt_logprobs": [("c", 4, [("c", 9, -2.5, top), ("c", 8, -0.5, ())])],
        "failures": [("d", "NO_TOKEN_ALLOWED", "nothing is left")],
    }
    answer = _result(ct, told)
    monkeypatch.setattr(compute.runner, "run", lambda _: answer)
    stream = await compute.client.open_stream()
    await stream.submit(first_step(3, 5))
    assert await stream.result() == _result(ports, told)
    await stream.close()


def _result(kinds, told):
    """A result of step 3 in the types of `kinds`."""

    def tops(pairs):
        return tuple(kinds.TokenLogprob(*pair) for pair in pairs)

    def tokens(entries):
        return [
            kinds.SampledToken(name, token, logprob, tops(top))
            for name, token, logprob, top in entries
        ]

    return kinds.StepResult(
        3,
        tokens(told["tokens"]),
        0.5,
        0.25,
        [kinds.Candidates(name, tops(pairs)) for name, pairs in told["candidates"]],
        [kinds.PromptLogprobs(n, start, tokens(t)) for n, start, t in told["prompt_logprobs"]],
        [kinds.SequenceFailure(*failure) for failure in told["failures"]],
    )


async def test_a_draft_model_is_told_of(compute, monkeypatch):
    info = dataclasses.replace(compute.runner.info(), has_draft_model=True)
    monkeypatch.setattr(compute.runner, "info", lambda: info)
    assert (await compute.client.get_model()).has_draft_model


async def test_steps_sent_ahead_are_answered_in_order(compute):
    stream = await compute.client.open_stream()
    compute.runner.gate.clear()
    await stream.submit(first_step(1, 5, 6))
    for step_id in (2, 3, 4):
        await stream.submit(decode_step(step_id, step_id))
    compute.runner.gate.set()
    tokens = [5, 6]
    for step_id in (1, 2, 3, 4):
        result = await stream.result()
        assert result.step_id == step_id
        assert [t.token_id for t in result.tokens] == [next_token(tokens)]
        tokens.append(next_token(tokens))
    assert len(compute.runner.threads) == 1
    await stream.close()


async def test_a_result_may_be_awaited_before_its_step_is_sent(compute):
    stream = await compute.client.open_stream()
    waiting = asyncio.create_task(stream.result())
    await asyncio.sleep(0)
    await stream.submit(first_step(1, 5))
    assert (await waiting).step_id == 1
    await stream.close()


async def test_a_refused_step_leaves_the_stream_open(compute):
    error = InvalidStep("no")
    stream = await compute.client.open_stream()
    await stream.submit(first_step(1, 5))
    await stream.result()
    compute.runner.step_error = error
    await stream.submit(decode_step(2, 1))
    with pytest.raises(StepRefused) as caught:
        await stream.result()
    assert caught.value.metadata["compute_reason"] == error.reason
    compute.runner.step_error = None
    await stream.submit(decode_step(3, 1))
    result = await stream.result()
    assert [t.token_id for t in result.tokens] == [next_token([5, next_token([5])])]
    await stream.close()


@pytest.mark.parametrize("error", [PoolUnavailable("gone"), ZeroDivisionError("bug")])
async def test_an_error_of_the_runner_itself_breaks_the_stream_only(compute, error):
    stream = await compute.client.open_stream()
    compute.runner.step_error = error
    await stream.submit(first_step(1, 5))
    with pytest.raises(WorkerUnavailable):
        await stream.result()
    await stream.close()
    compute.runner.step_error = None
    again = await compute.client.open_stream()
    await again.submit(first_step(2, 5))
    assert (await again.result()).step_id == 2
    await again.close()


async def test_there_is_one_driver_at_a_time(compute):
    first = await compute.client.open_stream()
    with pytest.raises(WorkerUnavailable, match="driver"):
        await compute.client.open_stream()
    await first.submit(first_step(1, 5))
    assert (await first.result()).step_id == 1
    await first.close()
    second = await compute.client.open_stream()
    await second.close()


async def test_sequences_end_with_their_stream(compute):
    first = await compute.client.open_stream()
    await first.submit(first_step(1, 5))
    await first.result()
    assert compute.runner.num_resets == 0
    await first.close()
    await first.close()
    second = await compute.client.open_stream()
    assert compute.runner.num_resets == 1
    await second.submit(decode_step(2, 1))
    with pytest.raises(StepRefused, match="unknown sequence"):
        await second.result()
    await second.close()


async def test_a_closed_stream_takes_and_gives_nothing(compute):
    stream = await compute.client.open_stream()
    await stream.close()
    with pytest.raises(WorkerUnavailable):
        await stream.submit(first_step(1, 5))
    with pytest.raises(WorkerUnavailable):
        await stream.result()
    assert compute.runner.steps == []


async def test_closing_ends_a_wait_for_a_result(compute):
    stream = await compute.client.open_stream()
    waiting = asyncio.create_task(stream.result())
    await asyncio.sleep(0.01)
    await stream.close()
    with pytest.raises(WorkerUnavailable):
        await waiting


async def test_the_event_loop_is_free_while_a_step_runs(compute):
    stream = await compute.client.open_stream()
    compute.runner.gate.clear()
    await stream.submit(first_step(1, 5))
    await until(compute.runner.running.is_set)
    assert (await compute.client.get_model()).model_id == "fake"
    compute.runner.gate.set()
    assert (await stream.result()).step_id == 1
    await stream.close()


async def test_a_new_driver_follows_the_last_ones_running_step(compute):
    first = await compute.client.open_stream()
    compute.runner.gate.clear()
    await first.submit(first_step(1, 5))
    await first.submit(decode_step(2, 1))
    await until(compute.runner.running.is_set)
    closing = asyncio.create_task(first.close())
    await asyncio.sleep(0.01)
    compute.runner.gate.set()
    await closing
    second = await compute.client.open_stream()
    await second.submit(first_step(3, 9))
    result = await second.result()
    assert [t.token_id for t in result.tokens] == [next_token([9])]
    assert compute.runner.steps[0] == 1
    assert compute.runner.steps[-1] == 3
    await second.close()


async def test_opening_attaches_the_present_pool(compute):
    compute.runner.present_generation = 2
    stream = await compute.client.open_stream()
    assert (await compute.client.get_model()).pool.generation == 2
    compute.runner.present_generation = 3
    assert (await compute.client.get_model()).pool.generation == 2  # the driver relies on it
    await stream.close()
    assert (await compute.client.get_model()).pool.generation == 3


@pytest.mark.parametrize("error", [PoolUnavailable("kvstore is away"), LayoutMismatch("other")])
async def test_a_pool_that_cannot_be_attached_leaves_the_seat_free(compute, error):
    compute.runner.refresh_error = error
    with pytest.raises(WorkerUnavailable, match=str(error)):
        await compute.client.open_stream()
    with pytest.raises(WorkerUnavailable, match=str(error)):
        await compute.client.get_model()
    compute.runner.refresh_error = None
    stream = await compute.client.open_stream()
    await stream.close()


async def test_a_driver_that_gives_up_while_opening_leaves_the_seat_free(compute):
    """Its call must end with it: a forgotten one would keep everybody out for good."""
    compute.runner.gate.clear()  # as if the kvstore did not answer
    opening = asyncio.create_task(compute.client.open_stream())
    await asyncio.sleep(0.05)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    del opening
    compute.runner.gate.set()

    for _ in range(500):
        try:
            stream = await compute.client.open_stream()
            break
        except WorkerUnavailable:  # the news of the cancelling is on its way
            await asyncio.sleep(0.01)
    await stream.close()


async def test_a_step_beyond_one_message_is_still_one_step(compute):
    """Three sequences together exceed 4 MiB."""
    stream = await compute.client.open_stream()
    await stream.submit(first_step(1, 5, sequence_id="old"))
    await stream.result()
    big = [
        SequenceState(name, [2**31 - 1] * 700_000, [1], SamplingOptions()) for name in ("b", "c")
    ]
    small = SequenceState("a", [5], [1], SamplingOptions())
    chunks = [Chunk(name, 0, 1, sample=True) for name in ("c", "a", "b")]
    await stream.submit(Step(2, closed=["old"], sequences=[*big, small], chunks=chunks))
    await stream.submit(decode_step(3, 1))
    result = await stream.result()
    assert result.step_id == 2
    assert [t.sequence_id for t in result.tokens] == ["c", "a", "b"]
    assert result.tokens[1].token_id == next_token([5])
    assert (await stream.result()).step_id == 3
    assert set(compute.runner.sequences) == {"a", "b", "c"}
    await stream.close()


async def test_long_grammars_and_many_biases_fit_as_well(compute):
    """Four sequences whose options, not their tokens, exceed 4 MiB together."""
    stream = await compute.client.open_stream()
    sampling = SamplingOptions(
        grammar="\U0001f600" * 250_000, logit_bias=tuple((n, -0.1) for n in range(1024))
    )
    states = [SequenceState(name, [5], [1], sampling) for name in "abcdefg"]
    await stream.submit(Step(1, sequences=states, chunks=[Chunk("g", 0, 1, sample=True)]))
    assert [t.sequence_id for t in (await stream.result()).tokens] == ["g"]
    await stream.close()


async def test_a_step_beyond_one_message_is_refused_once(compute):
    stream = await compute.client.open_stream()
    compute.runner.step_error = InvalidStep("no")
    big = [
        SequenceState(name, [2**31 - 1] * 700_000, [1], SamplingOptions()) for name in ("b", "c")
    ]
    await stream.submit(Step(1, sequences=big, chunks=[Chunk("b", 0, 1, sample=True)]))
    with pytest.raises(StepRefused):
        await stream.result()
    compute.runner.step_error = None
    await stream.submit(first_step(2, 5))
    assert (await stream.result()).step_id == 2
    await stream.close()


GRPC_ONLY = pytest.mark.parametrize("compute", ["grpc"], indirect=True)


@GRPC_ONLY
async def test_a_driver_that_vanishes_leaves_its_seat(compute):
    other = GrpcCompute(compute.address)
    stream = await other.open_stream()
    compute.runner.gate.clear()
    await stream.submit(first_step(1, 5))
    await stream.submit(decode_step(2, 1))
    await until(compute.runner.running.is_set)
    await other.close()  # the connection, without a word about the stream
    compute.runner.gate.set()
    await until(lambda: compute.runner.num_resets == 1)
    again = await compute.client.open_stream()
    await again.close()


@GRPC_ONLY
async def test_a_server_that_dies_ends_the_wait_for_a_result(compute):
    stream = await compute.client.open_stream()
    compute.runner.gate.clear()
    await stream.submit(first_step(1, 5))
    waiting = asyncio.create_task(stream.result())
    await until(compute.runner.running.is_set)
    await compute.server.stop(0)
    with pytest.raises(WorkerUnavailable):
        await waiting
    with pytest.raises(WorkerUnavailable):
        await stream.submit(decode_step(2, 1))
    with pytest.raises(WorkerUnavailable):
        await compute.client.get_model()
    with pytest.raises(WorkerUnavailable):
        await compute.client.open_stream()
    await stream.close()


@GRPC_ONLY
async def test_a_loading_server_is_unavailable(compute):
    compute.servicer.serve(None)
    with pytest.raises(WorkerUnavailable, match="loading"):
        await compute.client.get_model()
    with pytest.raises(WorkerUnavailable, match="loading"):
        await compute.client.open_stream()


async def test_nobody_listening_is_unavailable(tmp_path):
    client = GrpcCompute(f"unix:{tmp_path / 'nobody.sock'}")
    with pytest.raises(WorkerUnavailable):
        await client.get_model()
    with pytest.raises(WorkerUnavailable):
        await client.open_stream()
    await client.close()


async def test_clients_are_not_told_of_sockets(tmp_path):
    client = GrpcCompute(f"unix:{tmp_path / 'nobody.sock'}")
    with pytest.raises(WorkerUnavailable) as caught:
        await client.get_model()
    assert str(caught.value) == "compute is out of reach"
    await client.close()
