"""Grammars by llguidance: masks, trials taken back, ends, and what is broken."""

from __future__ import annotations

import json

import pytest
import torch
from llguidance import LLMatcher

from compute.errors import GrammarFailed
from compute.sampling import RowsToDraw, SequenceSampler, sample
from compute.types import SamplingOptions
from tests.unit.compute.sampling.grammars import EOS, OTHER_EOS, SCHEMA, WIDTH, regex
from tests.unit.compute.sampling.rows import make_logits


def _texts(tokenizer, mask) -> set[str]:
    return {tokenizer.decode([n]) for n in torch.nonzero(mask).flatten().tolist() if n > 1}


def _sampler(compiler, grammar, **options):
    made = SamplingOptions(grammar=grammar, stop_token_ids=(EOS, OTHER_EOS), **options)
    return SequenceSampler(made, 2, compiler.compile(grammar))


def _generate(sampler, count=80, seed=0):
    """Up to and without the end, from logits that know nothing of any grammar."""
    tokens = [5, 6]
    while len(tokens) < count:
        logits = make_logits(WIDTH, seed=1000 * seed + len(tokens), spread=4.0)
        [drawn] = sample(logits[None], [RowsToDraw(sampler, 0, tokens)])
        assert drawn.failure is None
        if drawn.tokens[0].token_id in (EOS, OTHER_EOS):
            return tokens[2:]
        tokens.append(drawn.tokens[0].token_id)
    raise AssertionError("the text did not end")


def test_masks_follow_the_text(compiler, tokenizer):
    state = compiler.compile(regex("ab|ac+")).begin()
    a, b, c = (tokenizer.token_to_id(name) for name in "abc")
    assert _texts(tokenizer, state.allowed()) == {"a"}
    state.advance(a)
    assert _texts(tokenizer, state.allowed()) == {"b", "c"}
    assert not state.allowed()[[EOS, OTHER_EOS]].any()
    state.advance(c)
    assert _texts(tokenizer, state.allowed()) == {"c"}
    assert state.allowed()[[EOS, OTHER_EOS]].all()
    state.go_back()
    state.advance(b)
    assert torch.nonzero(state.allowed()).flatten().tolist() == [EOS, OTHER_EOS]


def test_masks_are_as_wide_as_the_logits_and_never_allow_ids_without_a_token(compiler, tokenizer):
    state = compiler.compile(regex("(?s:.*)")).begin()
    allowed = state.allowed()
    assert allowed.shape == (WIDTH,)
    assert allowed.dtype == torch.bool
    assert not allowed[tokenizer.get_vocab_size() :].any()
    assert allowed[2 : tokenizer.get_vocab_size()].sum() > 100


@pytest.mark.parametrize("text", ["ab", "a*"])
@pytest.mark.parametrize("end", [EOS, OTHER_EOS])
def test_ends_can_be_taken_back_too(compiler, tokenizer, text, end):
    state = compiler.compile(regex(text)).begin()
    a, b = tokenizer.token_to_id("a"), tokenizer.token_to_id("b")
    for token in (a, b) if text == "ab" else (a, a):
        state.advance(token)
    before = state.allowed()
    state.advance(end)
    assert torch.nonzero(state.allowed()).flatten().tolist() == [EOS, OTHER_EOS]
    state.advance(EOS)
    with pytest.raises(GrammarFailed):
        state.advance(a)
    state.go_back()
    state.go_back()
    assert torch.equal(state.allowed(), before)
    state.go_back()
    state.advance(b if text == "ab" else a)
    assert torch.equal(state.allowed(), before)


def test_forbidden_tokens_change_nothing(compiler, tokenizer):
    state = compiler.compile(regex("ab")).begin()
    before = state.allowed()
    for token in (tokenizer.token_to_id("b"), EOS, WIDTH - 1, WIDTH, 2**40, -1):
        with pytest.raises(GrammarFailed, match=f"token {token}"):
            state.advance(token)
        assert torch.equal(state.allowed(), before)


def test_states_of_one_grammar_are_apart(compiler, tokenizer):
    grammar = compiler.compile(regex("ab"))
    first, second = grammar.begin(), compiler.compile(regex("ab")).begin()
    first.advance(tokenizer.token_to_id("a"))
    assert _texts(tokenizer, first.allowed()) == {"b"}
    assert _texts(tokenizer, second.allowed()) == {"a"}


def test_a_broken_grammar_fails_where_it_is_used(compiler):
    grammar = compiler.compile("no grammar at all")
    with pytest.raises(GrammarFailed, match="cannot be followed"):
        grammar.begin()
    sampler = SequenceSampler(SamplingOptions(grammar="x"), 2, grammar)
    plain = SequenceSampler(SamplingOptions())
    logits = make_logits(WIDTH).expand(2, -1)
    wanted = [RowsToDraw(sampler, 0, [5, 6]), RowsToDraw(plain, 1, [5])]
    failed, drawn = sample(logits, wanted)
    assert failed.failure.reason == "GRAMMAR_FAILED"
    assert len(drawn.tokens) == 1


def test_more_grammars_than_are_kept_still_work(compiler, tokenizer):
    for n in range(70):
        state = compiler.compile(regex(f"a{{{n + 1}}}b")).begin()
        assert _texts(tokenizer, state.allowed()) == {"a"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(6))
def test_texts_under_a_schema_are_json_that_fits(compiler, tokenizer, temperature, seed):
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))
    sampler = _sampler(
        compiler,
        grammar,
        temperature=temperature,
        seed=seed,
        frequency_penalty=1.5,
        # Spaces may go on for ever between JSON's tokens.
        logit_bias=tuple((tokenizer.token_to_id(c), -100.0) for c in ("Ġ", "Ċ", "ĉ", "č")),
    )
    text = tokenizer.decode(_generate(sampler, 200, seed))
    value = json.loads(text)
    assert list(value) == ["name", "inner", "list"]
    assert len(value["name"]) <= 6
    assert 0 <= value["inner"]["n"] <= 99
    assert set(value["list"]) <= {"a", "b"}
    assert len(value["list"]) <= 2


def test_a_state_made_from_the_tokens_is_the_one_that_went_along(compiler):
    """What a sequence that was suspended comes back with."""
    grammar = regex("[a-d]{3}(x|yz)[0-9]{2,4}")
    along = _sampler(compiler, grammar, temperature=1.0, seed=4)
    tokens = [5, 6]
    for _ in range(7):
        logits = make_logits(WIDTH, seed=len(tokens))[None]
        anew = _sampler(compiler, grammar, temperature=1.0, seed=4)
        [expected] = sample(logits, [RowsToDraw(anew, 0, tokens)])
        [drawn] = sample(logits, [RowsToDraw(along, 0, tokens)])
        assert drawn == expected
        tokens.append(drawn.tokens[0].token_id)


@pytest.mark.parametrize("num_right", range(5))
def test_guesses_are_tried_against_the_grammar_and_taken_back(compiler, tokenizer, num_right):
    grammar = regex("[a-d]{4}(x|yz)")
    options = {"temperature": 1.0, "seed": 9}
    logits = torch.stack([make_logits(WIDTH, seed=n) for n in range(5)])
    stepwise, tokens = _sampler(compiler, grammar, **options), [5, 6]
    alone = []
    for row in logits:
        [drawn] = sample(row[None], [RowsToDraw(stepwise, 0, tokens)])
        alone += drawn.tokens
        tokens.append(drawn.tokens[0].token_id)
    wrong = tokenizer.token_to_id("!")  # fits nowhere
    guesses = [*(token.token_id for token in alone[:num_right]), *[wrong] * (4 - num_right)]
    sampler = _sampler(compiler, grammar, **options)
    for _ in range(2):
        [drawn] = sample(logits, [RowsToDraw(sampler, 0, [5, 6], guesses=guesses)])
        assert drawn.tokens == alone[: num_right + 1]


def test_a_text_that_is_complete_ends_although_more_tokens_were_asked_for(compiler, tokenizer):
    sampler = _sampler(compiler, regex("ab|abc"), min_tokens=3)
    a, b, c = (tokenizer.token_to_id(name) for name in "abc")
    assert _generate(sampler) == [a, b, c]  # "ab" is one too short
    sampler = _sampler(compiler, regex("ab"), min_tokens=50)
    assert _generate(sampler) == [a, b]
