"""Masks of grammars against slow oracles; draws, guesses and candidates under them."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from scipy import stats

from compute.errors import GrammarFailed
from compute.sampling import RowsToDraw, SequenceSampler, sample
from compute.sampling.grammar import MatcherState
from compute.types import SamplingOptions
from tests.unit.compute.sampling.grammars import (
    EOS,
    OTHER_EOS,
    SCHEMA,
    WIDTH,
    bytes_of,
    make_tokenizer,
    regex,
)
from tests.unit.compute.sampling.rows import make_logits

BYTES = bytes_of(make_tokenizer())
ENDS = (EOS, OTHER_EOS)
GRAMMARS = {
    "schema": LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA)),
    "object": LLMatcher.grammar_from_json_schema('{"type":"object"}'),
    "regex": regex("(mn|mno)*(é|[0-9]{2,4})?"),
    "text": regex("(?s:.*)"),
    "nested": LLMatcher.grammar_from_lark('start: "{" start? "}" | "mno" | /[0-9]+/'),
}
# One compiler for all examples.
quick = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def _ids(mask: torch.Tensor) -> list[int]:
    return torch.nonzero(mask).flatten().tolist()


def _pick(state, number: int) -> int:
    """Some allowed token; an end only if there is nothing else."""
    ids = [token for token in _ids(state.allowed()) if token not in ENDS] or [EOS]
    return ids[number % len(ids)]


def _is_mask(allowed: list[int], possible: list[int]) -> bool:
    """Where the next byte is forced, the library allows the tokenizer's own spelling alone."""
    starts = {BYTES[token][:1] for token in possible if token in BYTES}
    is_forced = len(starts) == 1 and not set(ENDS) & set(possible)
    return allowed == possible or (is_forced and len(allowed) == 1 and allowed[0] in possible)


def _sampler(compiler, grammar: str, **options) -> SequenceSampler:
    made = SamplingOptions(grammar=grammar, stop_token_ids=ENDS, **options)
    return SequenceSampler(made, 2, compiler.compile(grammar))


TEXTS = st.text(alphabet='abcéü"{}:n\\\n 7', min_size=1, max_size=7)


@quick
@given(
    st.lists(TEXTS, min_size=1, max_size=6, unique=True),
    st.lists(st.integers(0, 300), max_size=10),
)
def test_a_choice_allows_what_goes_on_to_one_of_the_texts(compiler, texts, numbers):
    """As the gateway writes choices. Tokens may be a part of a character."""
    grammar = LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, texts)))
    choices = [text.encode() for text in texts]
    state, so_far = compiler.compile(grammar).begin(), b""
    for number in numbers:
        expected = [
            token
            for token, spelled in BYTES.items()
            if any(text.startswith(so_far + spelled) for text in choices)
        ]
        if so_far in choices:
            expected += ENDS
        assert _is_mask(_ids(state.allowed()), sorted(expected))
        token = sorted(expected)[number % len(expected)]
        if token in ENDS:
            return
        state.advance(token)
        so_far += BYTES[token]


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_token_is_allowed_if_and_only_if_it_can_come(compiler, name):
    state = compiler.compile(GRAMMARS[name]).begin()
    rng = np.random.default_rng(5)
    for _ in range(25):
        allowed = state.allowed()
        possible = []
        for token in range(WIDTH):
            try:
                state.advance(token)
            except GrammarFailed:
                continue
            possible.append(token)
            state.go_back()
        assert _is_mask(_ids(allowed), possible)
        assert torch.equal(state.allowed(), allowed)
        token = _pick(state, int(rng.integers(0, 10**6)))
        if token == EOS:
            return
        state.advance(token)


@quick
@given(
    st.sampled_from(sorted(GRAMMARS)),
    st.lists(st.one_of(st.integers(0, 10**6), st.just("back"), st.just("end")), max_size=40),
)
def test_a_state_is_that_of_its_tokens_however_it_came_there(compiler, name, events):
    grammar = compiler.compile(GRAMMARS[name])
    state, tokens = grammar.begin(), []
    for event in events:
        if event == "back":
            if not tokens:
                continue
            state.go_back()
            tokens.pop()
        else:
            token = _pick(state, event) if event != "end" else OTHER_EOS
            try:
                state.advance(token)
            except GrammarFailed:
                assert event == "end"
            else:
                tokens.append(token)
        fresh = grammar.begin()
        for token in tokens:
            fresh.advance(token)
        assert torch.equal(state.allowed(), fresh.allowed())


def test_special_tokens_are_no_text(compiler, tokenizer):
    allowed = compiler.compile(GRAMMARS["text"]).begin().allowed()
    assert not allowed[tokenizer.token_to_id("<other>")]
    assert allowed[list(ENDS)].all()
    assert set(_ids(allowed)) <= {*BYTES, *ENDS}


def test_a_mask_is_the_callers_to_keep(compiler, tokenizer):
    state = compiler.compile(regex("ab?c")).begin()
    mask = state.allowed()
    before = mask.clone()
    state.advance(tokenizer.token_to_id("a"))
    state.allowed()
    assert torch.equal(mask, before)
    mask.zero_()
    assert state.allowed().any()


def test_a_state_beyond_the_librarys_limits_fails_and_takes_nothing_more(tokenizer):
    limits = LLParserLimits(max_lexer_states=5, verbose_errors=False)
    read = LLTokenizer(tokenizer.to_str(), n_vocab=WIDTH, eos_token=list(ENDS))
    matcher = LLMatcher(read, GRAMMARS["schema"], log_level=0, limits=limits)
    state = MatcherState(matcher, WIDTH, frozenset(ENDS))
    state.advance(_pick(state, 0))

    def walk():
        for _ in range(50):
            state.advance(_pick(state, 0))

    with pytest.raises(GrammarFailed, match="too many states"):
        walk()
    for token in (EOS, OTHER_EOS, 66):
        with pytest.raises(GrammarFailed, match="too many states"):
            state.advance(token)
    state.go_back()  # as a step does that takes back what it tried
    with pytest.raises(GrammarFailed, match="too many states"):
        state.allowed()


def _generate(sampler, seed, most=150):
    tokens = [5, 6]
    while len(tokens) < most:
        logits = make_logits(WIDTH, seed=1000 * seed + len(tokens), spread=3.0)
        [drawn] = sample(logits[None], [RowsToDraw(sampler, 0, tokens)])
        assert drawn.failure is None
        if drawn.tokens[0].token_id in ENDS:
            return b"".join(BYTES[token] for token in tokens[2:])
        tokens.append(drawn.tokens[0].token_id)
    raise AssertionError("the text did not end")


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e300])
@pytest.mark.parametrize("pattern", ["[a-f]{3,9}(-[0-9]{2}){1,3}", "(é|ü|no)+\\.?x{2}", "m|mn|mno"])
def test_texts_under_an_expression_match_it(compiler, temperature, pattern):
    for seed in range(5):
        sampler = _sampler(compiler, regex(pattern), temperature=temperature, seed=seed)
        assert re.fullmatch(pattern, _generate(sampler, seed).decode())


def test_texts_under_a_choice_are_among_it_and_all_come(compiler):
    texts = ["yes", "no", "né", "nobody"]
    grammar = LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, texts)))
    found = set()
    for seed in range(40):
        sampler = _sampler(compiler, grammar, temperature=1.5, seed=seed)
        found.add(_generate(sampler, seed).decode())
    assert found == set(texts)


@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1}])
def test_draws_follow_the_distribution_of_what_is_allowed(compiler, options):
    """Limits come behind the mask: they keep the likeliest of the allowed ones."""
    grammar = regex("[a-h][0-9]")
    letters = sorted(
        token for token, text in BYTES.items() if text in {b"%c" % n for n in b"abcdefgh"}
    )
    logits = make_logits(WIDTH, seed=2, spread=1.0)
    wanted = [
        RowsToDraw(_sampler(compiler, grammar, temperature=1.3, seed=seed, **options), 0, [5, 6])
        for seed in range(3000)
    ]
    tokens = [each.tokens[0].token_id for each in sample(logits[None], wanted)]
    probs = torch.softmax(logits[letters] / 1.3, dim=0).double()
    order = torch.argsort(probs, descending=True)
    if "top_k" in options:
        probs[order[4:]] = 0
    if "top_p" in options:
        before = torch.cumsum(probs[order], dim=0) - probs[order]
        probs[order[before >= 0.8]] = 0
    if "min_p" in options:
        probs[probs < 0.1 * probs.max()] = 0
    probs = (probs / probs.sum()).numpy()
    counts = np.array([tokens.count(token) for token in letters])
    assert counts.sum() == len(tokens)
    assert counts[probs == 0].sum() == 0
    kept = probs > 0
    assert kept.sum() >= 3
    assert stats.chisquare(counts[kept], probs[kept] * len(tokens)).pvalue > 1e-3


def _logits_after(tokens):
    return make_logits(WIDTH, seed=hash(tuple(tokens)) % 2**31, spread=3.0)


@quick
@given(
    st.sampled_from(["schema", "regex", "nested"]),
    st.sampled_from([0.0, 1.0]),
    st.integers(0, 2**64 - 1),
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, WIDTH - 1), st.booleans()),
        min_size=1,
        max_size=8,
    ),
)
def test_guesses_change_no_text_under_a_grammar(compiler, name, temperature, seed, plan):
    """Behind the end too, where a sequence that ignores ends goes on."""
    options = {
        "temperature": temperature,
        "seed": seed,
        "frequency_penalty": 0.6,
        "min_tokens": 3,
        "return_logprob": True,
    }
    alone, tokens, expected = _sampler(compiler, GRAMMARS[name], **options), [5, 6], []
    for _ in range(5 * len(plan)):
        [drawn] = sample(_logits_after(tokens)[None], [RowsToDraw(alone, 0, tokens)])
        expected += drawn.tokens
        tokens.append(drawn.tokens[0].token_id)
    sampler, got = _sampler(compiler, GRAMMARS[name], **options), []
    for num_guesses, wrong, is_wrong in plan:
        guesses = tokens[2 + len(got) : 2 + len(got) + num_guesses]
        if guesses and is_wrong:
            guesses[-1] = wrong
        known = tokens[: 2 + len(got)]
        rows = [_logits_after([*known, *guesses[:n]]) for n in range(len(guesses) + 1)]
        [drawn] = sample(torch.stack(rows), [RowsToDraw(sampler, 0, known, guesses=guesses)])
        assert drawn.failure is None
        got += drawn.tokens
    assert got == expected[: len(got)]


def test_tokens_that_do_not_fit_the_grammar_fail_their_sequence_alone(compiler, tokenizer):
    grammar = regex("ab")
    a, b = tokenizer.token_to_id("a"), tokenizer.token_to_id("b")
    logits = make_logits(WIDTH).expand(3, -1)
    good, bad, sent = (_sampler(compiler, grammar) for _ in range(3))
    wanted = [
        RowsToDraw(good, 0, [5, 6, a]),
        RowsToDraw(bad, 1, [5, 6, b]),
        RowsToDraw(sent, 2, [5, 6], [a, a]),
    ]
    for _ in range(2):
        first, second, third = sample(logits, wanted)
        assert [token.token_id for token in first.tokens] == [b]
        assert second.failure.reason == third.failure.reason == "GRAMMAR_FAILED"
    # What was sent in vain has left nothing behind.
    [drawn] = sample(logits[:1], [RowsToDraw(sent, 0, [5, 6], [a])])
    assert [token.token_id for token in drawn.tokens] == [b]


def test_candidates_are_what_the_grammar_allows(compiler, tokenizer):
    logits = make_logits(WIDTH)
    allowed = compiler.compile(regex("[a-e]x")).begin().allowed()
    expected = torch.log_softmax(logits, dim=0).masked_fill(~allowed, -torch.inf)
    best = torch.topk(expected, int(allowed.sum()))
    sampler = _sampler(compiler, regex("[a-e]x"), num_candidates=50)
    [drawn] = sample(logits[None], [RowsToDraw(sampler, 0, [5, 6])])
    assert [token.token_id for token in drawn.candidates] == best.indices.tolist()
    values = [token.logprob for token in drawn.candidates]
    assert values == pytest.approx(best.values.tolist(), abs=1e-5)
    done = [5, 6, tokenizer.token_to_id("a"), tokenizer.token_to_id("x")]
    [drawn] = sample(logits[None], [RowsToDraw(sampler, 0, done)])
    assert sorted(token.token_id for token in drawn.candidates) == [EOS, OTHER_EOS]


def test_logits_that_rule_out_all_that_is_allowed_leave_no_token(compiler, tokenizer):
    logits = make_logits(WIDTH)
    logits[tokenizer.token_to_id("a")] = -torch.inf
    for options in ({}, {"temperature": 1.0}, {"num_candidates": 3}, {"min_tokens": 2}):
        sampler = _sampler(compiler, regex("a!"), **options)
        [drawn] = sample(logits[None], [RowsToDraw(sampler, 0, [5, 6])])
        assert drawn.failure.reason == "NO_TOKEN_ALLOWED"


def test_a_row_under_a_grammar_is_drawn_as_if_it_were_alone(compiler):
    logits = torch.stack([make_logits(WIDTH, seed=n) for n in range(6)])

    def rows():
        return [
            RowsToDraw(
                _sampler(compiler, GRAMMARS[name], temperature=1.0, seed=n, return_logprob=True),
                n,
                [5, 6],
            )
            if name
            else RowsToDraw(SequenceSampler(SamplingOptions(temperature=1.0, seed=n)), n, [5, 6])
            for n, name in enumerate(["schema", "", "regex", "schema", "text", ""])
        ]

    together = sample(logits, rows())
    for n, wanted in enumerate(rows()):
        assert sample(logits, [wanted]) == [together[n]]
