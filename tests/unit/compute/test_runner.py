"""The step contract: what is refused, what changes, and what does not."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from compute.errors import InvalidStep, PoolUnavailable
from compute.fakes import SimpleDriver
from compute.sampling import GrammarCompiler
from compute.types import (
    BlockCopy,
    Chunk,
    KvShape,
    SamplingOptions,
    SequenceState,
    Step,
    TableExtension,
)

PROMPT = [5, 17, 3, 88, 41, 2, 9, 60, 33, 7]  # ten tokens: two blocks of eight
GREEDY = SamplingOptions()


@pytest.fixture
def model(make_model):
    return make_model()


@pytest.fixture
def pool(make_pool):
    return make_pool(num_blocks=16, block_size=8)


@pytest.fixture
def runner(model, pool):
    runner = model.runner(pool)
    yield runner
    runner.close()


def _state(name="a", tokens=PROMPT, blocks=(4, 9), sampling=GREEDY):
    return SequenceState(name, tokens, blocks, sampling)


def _greedy(model, token_ids, count):
    token_ids = list(token_ids)
    start = len(token_ids)
    for _ in range(count):
        token_ids.append(int(model.logits(token_ids)[-1].argmax()))
    return token_ids[start:]


def _tokens(result):
    return [token.token_id for token in result.tokens]


def test_info_and_handle_describe_model_and_pool(runner, pool):
    info = runner.info()
    assert (info.model_id, info.fingerprint) == ("tiny", b"\0" * 32)
    assert (info.vocab_size, info.max_sequence_length) == (97, 256)
    assert info.kv_shape == KvShape(2, 2, 16, "float32")
    assert runner.handle() == pool.attach_pool(info.kv_shape)


def test_a_sequence_prefills_in_chunks_and_decodes(runner, model):
    expected = _greedy(model, PROMPT, 4)
    first = runner.run(Step(1, sequences=[_state()], chunks=[Chunk("a", 0, 6, False)]))
    assert (first.step_id, first.tokens) == (1, [])
    got = _tokens(runner.run(Step(2, chunks=[Chunk("a", 6, 4, True)])))
    for n in range(3):
        got += _tokens(runner.run(Step(3 + n, chunks=[Chunk("a", 10 + n, 1, True)])))
    assert got == expected


def test_tokens_come_in_the_order_of_the_chunks(runner, model):
    states = [_state("a"), _state("b", PROMPT[:3], [1]), _state("c", PROMPT[:1], [2])]
    chunks = [Chunk("a", 0, 10, True), Chunk("c", 0, 1, True), Chunk("b", 0, 3, True)]
    result = runner.run(Step(1, sequences=states, chunks=chunks))
    assert [token.sequence_id for token in result.tokens] == ["a", "c", "b"]
    assert _tokens(result) == [_greedy(model, PROMPT[:n], 1)[0] for n in (10, 1, 3)]
    assert result.elapsed > 0


def test_log_probabilities_come_if_asked_for(runner, model):
    sampling = SamplingOptions(return_logprob=True)
    step = Step(1, sequences=[_state(sampling=sampling)], chunks=[Chunk("a", 0, 10, True)])
    [token] = runner.run(step).tokens
    expected = torch.log_softmax(model.logits(PROMPT)[-1], dim=0)[token.token_id]
    assert token.logprob == pytest.approx(float(expected), abs=1e-4)


def test_a_grown_table_is_used(runner, model):
    runner.run(Step(1, sequences=[_state(blocks=[4])], chunks=[Chunk("a", 0, 8, False)]))
    extension = TableExtension("a", 1, [9])
    result = runner.run(Step(2, extensions=[extension], chunks=[Chunk("a", 8, 2, True)]))
    assert _tokens(result) == _greedy(model, PROMPT, 1)
    again = runner.run(Step(3, extensions=[extension], chunks=[Chunk("a", 10, 1, True)]))
    assert _tokens(again) == _greedy(model, PROMPT, 2)[1:]


def test_a_copied_block_serves_a_fork(runner, model):
    runner.run(Step(1, sequences=[_state()], chunks=[Chunk("a", 0, 10, False)]))
    fork = [*PROMPT, 50]
    step = Step(
        2,
        sequences=[_state("b", fork, [4, 11])],
        copies=[BlockCopy(9, 11)],
        chunks=[Chunk("b", 10, 1, True)],
    )
    assert _tokens(runner.run(step)) == _greedy(model, fork, 1)
    recomputed = runner.run(Step(3, chunks=[Chunk("a", 9, 1, True)]))
    assert _tokens(recomputed) == _greedy(model, PROMPT, 1)


def test_a_resent_state_replaces_the_old_one(runner, model):
    runner.run(Step(1, sequences=[_state()], chunks=[Chunk("a", 0, 10, True)]))
    other = PROMPT[::-1]
    step = Step(2, sequences=[_state(tokens=other)], chunks=[Chunk("a", 0, 10, True)])
    assert _tokens(runner.run(step)) == _greedy(model, other, 1)


def test_a_resumed_sequence_draws_the_tokens_it_would_have_drawn(runner):
    sampling = {"a": SamplingOptions(temperature=1.5, seed=99)}
    whole = SimpleDriver(runner).generate({"a": PROMPT}, 6, sampling)["a"].token_ids
    for cut in range(6):
        resumed = SimpleDriver(runner, shuffle_seed=cut).generate(
            {"a": PROMPT + whole[:cut]}, 6 - cut, sampling
        )
        assert resumed["a"].token_ids == whole[cut:]


def test_closed_sequences_are_forgotten_and_unknown_ones_ignored(runner):
    runner.run(Step(1, sequences=[_state()]))
    assert runner.run(Step(2, closed=["a", "never seen"])).tokens == []
    with pytest.raises(InvalidStep, match="'a' is not known"):
        runner.run(Step(3, chunks=[Chunk("a", 0, 1, False)]))


def test_a_sequence_closed_and_sent_anew_in_one_step_is_known(runner, model):
    runner.run(Step(1, sequences=[_state()]))
    step = Step(
        2, closed=["a"], sequences=[_state(tokens=PROMPT[:4])], chunks=[Chunk("a", 0, 4, True)]
    )
    assert _tokens(runner.run(step)) == _greedy(model, PROMPT[:4], 1)


def test_reset_forgets_all_sequences(runner):
    runner.run(Step(1, sequences=[_state("a"), _state("b", blocks=[1, 2])]))
    runner.reset()
    for name in ("a", "b"):
        with pytest.raises(InvalidStep, match="not known"):
            runner.run(Step(2, chunks=[Chunk(name, 0, 1, False)]))


def _long(num_tokens):
    return _state("n", [1] * num_tokens, list(range(16)) * 3)


REFUSED = {
    "chunk of an unknown sequence": (Step(2, chunks=[Chunk("z", 0, 1, False)]), "not known"),
    "extension of an unknown sequence": (
        Step(2, extensions=[TableExtension("z", 0, [1])]),
        "not known",
    ),
    "chunk of a sequence closed in the step": (
        Step(2, closed=["a"], chunks=[Chunk("a", 0, 1, False)]),
        "not known",
    ),
    "chunk beyond known tokens": (Step(2, chunks=[Chunk("a", 8, 3, False)]), "10 known tokens"),
    "chunk from beyond 64 bits": (Step(2, chunks=[Chunk("a", 2**64, 1, False)]), "10 known tokens"),
    "chunk of more than 32 bits": (
        Step(2, chunks=[Chunk("a", 0, 2**40, False)]),
        "10 known tokens",
    ),
    "chunk of less than no tokens": (Step(2, chunks=[Chunk("a", 9, -9, False)]), "computes -9"),
    "token past 64 bits": (Step(2, sequences=[_state("n", [2**64], [1])]), "token outside"),
    "chunk without a block": (
        Step(2, sequences=[_state("n", [1], [])], chunks=[Chunk("n", 0, 1, False)]),
        "room for 0 tokens",
    ),
    "chunk of no tokens": (Step(2, chunks=[Chunk("a", 3, 0, False)]), "computes 0 tokens"),
    "chunk from before the start": (Step(2, chunks=[Chunk("a", -1, 2, False)]), "from -1"),
    "sampling before the end": (Step(2, chunks=[Chunk("a", 0, 9, True)]), "samples after token 9"),
    "two chunks of a sequence": (
        Step(2, chunks=[Chunk("a", 0, 4, False), Chunk("a", 4, 4, False)]),
        "appears twice",
    ),
    "two states of a sequence": (
        Step(2, sequences=[_state("n", [1], [1]), _state("n", [1], [1])]),
        "appears twice",
    ),
    "table too short for the chunk": (
        Step(2, sequences=[_state("n", PROMPT, [3])], chunks=[Chunk("n", 0, 10, False)]),
        "room for 8 tokens",
    ),
    "block past the pool": (Step(2, sequences=[_state("n", [1], [16])]), "block 16"),
    "negative block": (Step(2, sequences=[_state("n", [1], [-1])]), "block -1"),
    "block past 32 bits": (Step(2, extensions=[TableExtension("a", 2, [2**40])]), "block 1099"),
    "gap in a table": (Step(2, extensions=[TableExtension("a", 3, [1])]), "starts at 3"),
    "negative index in a table": (
        Step(2, extensions=[TableExtension("a", -1, [1])]),
        "starts at -1",
    ),
    "copy from past the pool": (Step(2, copies=[BlockCopy(16, 0)]), "block 16"),
    "copy to before the pool": (Step(2, copies=[BlockCopy(0, -1)]), "block -1"),
    "token past the vocabulary": (Step(2, sequences=[_state("n", [97], [1])]), "token outside"),
    "negative token": (Step(2, sequences=[_state("n", [-1], [1])]), "token outside"),
    "no tokens": (Step(2, sequences=[_state("n", [], [1])]), "has no tokens"),
    "longer than the model takes": (Step(2, sequences=[_long(257)]), "257 tokens"),
    "bad sampling option": (
        Step(2, sequences=[_state("n", [1], [1], SamplingOptions(top_p=0.0))]),
        "top_p",
    ),
    "two tokens in one slot": (
        Step(
            2,
            sequences=[_state("n", [1], [5]), _state("m", [1], [5])],
            chunks=[Chunk("n", 0, 1, False), Chunk("m", 0, 1, False)],
        ),
        "share a slot",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_step_changes_nothing(case, runner, model):
    bad, message = REFUSED[case]
    runner.run(Step(1, sequences=[_state()], chunks=[Chunk("a", 0, 10, False)]))
    before = runner._pool.tensor.clone()
    # Sound parts come before the bad one and must not take effect either.
    bad = Step(
        bad.step_id,
        closed=bad.closed,
        sequences=[_state("new", [1], [1]), *bad.sequences],
        extensions=[TableExtension("a", 2, [7]), *bad.extensions]
        if not bad.closed and not bad.extensions
        else bad.extensions,
        copies=[BlockCopy(4, 12), *bad.copies],
        chunks=[Chunk("new", 0, 1, True), *bad.chunks],
    )
    with pytest.raises(InvalidStep, match=message):
        runner.run(bad)
    assert torch.equal(runner._pool.tensor, before)
    with pytest.raises(InvalidStep, match="'new' is not known"):
        runner.run(Step(3, chunks=[Chunk("new", 0, 1, False)]))
    result = runner.run(Step(4, chunks=[Chunk("a", 9, 1, True)]))
    assert _tokens(result) == _greedy(model, PROMPT, 1)


def test_an_empty_step_does_nothing(runner, model):
    runner.run(Step(1, sequences=[_state()], chunks=[Chunk("a", 0, 9, False)]))
    before = runner._pool.tensor.clone()
    result = runner.run(Step(2))
    assert (result.step_id, result.tokens) == (2, [])
    assert torch.equal(runner._pool.tensor, before)
    result = runner.run(Step(3, chunks=[Chunk("a", 9, 1, True)]))
    assert _tokens(result) == _greedy(model, PROMPT, 1)


def test_a_step_of_copies_alone_copies(runner):
    runner.run(Step(1, sequences=[_state()], chunks=[Chunk("a", 0, 10, False)]))
    before = runner._pool.tensor.clone()
    assert runner.run(Step(2, copies=[BlockCopy(4, 12), BlockCopy(12, 13)])).tokens == []
    after = runner._pool.tensor
    assert torch.equal(after[12], before[4])
    assert torch.equal(after[13], before[4])
    others = [n for n in range(16) if n not in (12, 13)]
    assert torch.equal(after[others], before[others])


def test_the_last_position_can_be_computed_and_none_after_it(runner):
    runner.run(
        Step(
            1,
            sequences=[_state("a", [1] * 256, list(range(16)) * 2)],
            chunks=[Chunk("a", 0, 1, False)],
        )
    )
    result = runner.run(Step(2, chunks=[Chunk("a", 255, 1, True)]))
    assert len(result.tokens) == 1
    extension = TableExtension("a", 32, [0])
    with pytest.raises(InvalidStep, match="the model takes 256"):
        runner.run(Step(3, extensions=[extension], chunks=[Chunk("a", 256, 1, True)]))


def test_unusable_logits_fail_their_sequence_and_append_nothing(runner, model):
    states = [_state(), _state("b", blocks=[2, 3])]
    chunks = [Chunk(name, 0, 9, False) for name in ("a", "b")]
    runner.run(Step(1, sequences=states, chunks=chunks))
    good = runner._pool.tensor.clone()
    runner._pool.tensor[4].fill_(float("nan"))
    result = runner.run(Step(2, chunks=[Chunk(name, 9, 1, True) for name in ("a", "b")]))
    [failure] = result.failures
    assert (failure.sequence_id, failure.reason) == ("a", "LOGITS_NOT_FINITE")
    assert [token.sequence_id for token in result.tokens] == ["b"]
    assert _tokens(result) == _greedy(model, PROMPT, 1)
    runner._pool.tensor.copy_(good)
    result = runner.run(Step(3, chunks=[Chunk("a", 9, 1, True)]))
    assert _tokens(result) == _greedy(model, PROMPT, 1)


def test_refreshing_keeps_the_pool_and_the_sequences_if_it_is_the_same(runner, model):
    runner.run(Step(1, sequences=[_state()], chunks=[Chunk("a", 0, 9, False)]))
    before = runner.handle()
    runner.refresh_pool()
    assert runner.handle() == before
    result = runner.run(Step(2, chunks=[Chunk("a", 9, 1, True)]))
    assert _tokens(result) == _greedy(model, PROMPT, 1)


def test_refreshing_attaches_a_new_pool_and_forgets_the_sequences(runner, model, pool):
    runner.run(Step(1, sequences=[_state()], chunks=[Chunk("a", 0, 9, False)]))
    before = runner.handle()
    pool.replace(before.layout.shape)
    runner.refresh_pool()
    assert runner.handle().generation != before.generation
    with pytest.raises(InvalidStep, match="not known"):
        runner.run(Step(2, chunks=[Chunk("a", 9, 1, True)]))
    step = Step(3, sequences=[_state()], chunks=[Chunk("a", 0, 10, True)])
    assert _tokens(runner.run(step)) == _greedy(model, PROMPT, 1)


def test_a_failed_refresh_leaves_the_old_pool_attached(runner, model, pool):
    runner.run(Step(1, sequences=[_state()], chunks=[Chunk("a", 0, 9, False)]))
    before = runner.handle()
    pool.close()
    with pytest.raises(PoolUnavailable):
        runner.refresh_pool()
    assert runner.handle() == before
    result = runner.run(Step(2, chunks=[Chunk("a", 9, 1, True)]))
    assert _tokens(result) == _greedy(model, PROMPT, 1)


def test_a_closed_runner_runs_nothing_and_compiles_nothing(model, pool):
    grammars = Mock(spec=GrammarCompiler)
    runner = model.runner(pool, grammars=grammars)
    grammars.close.assert_not_called()
    runner.close()
    grammars.close.assert_called_once_with()
    with pytest.raises(PoolUnavailable):
        runner.run(Step(1))
