"""When grammars are compiled, how often, on what thread, and what is said if it fails."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from llguidance import LLMatcher

from compute.errors import GrammarFailed
from compute.sampling import GrammarCompiler, NoGrammars
from tests.unit.compute.sampling.grammars import EOS, OTHER_EOS, WIDTH, make_tokenizer, regex

TEXT = make_tokenizer().to_str()


class _Watched(GrammarCompiler):
    """Waits for a sign before it reads the tokenizer; notes what it compiles and where."""

    def __init__(self, *arguments) -> None:
        self.may_start = threading.Event()
        self.compiled: list[str] = []
        self.threads: set[int] = set()
        super().__init__(*arguments)

    def _read(self, tokenizer):
        self.may_start.wait()
        return super()._read(tokenizer)

    def _compile(self, text):
        self.compiled.append(text)
        self.threads.add(threading.get_ident())
        return super()._compile(text)


@pytest.fixture
def watched():
    made = _Watched(TEXT, WIDTH, [EOS])
    yield made
    made.may_start.set()
    made.close()


def test_compile_returns_before_the_compiler_has_begun(watched):
    grammar = watched.compile(regex("ab"))
    assert watched.compiled == []
    watched.may_start.set()
    assert grammar.begin().allowed().any()
    assert watched.threads.isdisjoint({threading.get_ident()})


def test_a_text_is_compiled_once(watched):
    watched.may_start.set()
    text, other = regex("ab"), regex("cd")
    for each in (text, other, text, text, other):
        watched.compile(each).begin()
    assert watched.compiled == [text, other]


def test_the_grammar_that_was_not_used_for_longest_makes_room(watched):
    watched.may_start.set()
    first, *others = (regex(f"a{n}") for n in range(65))
    watched.compile(first)
    for text in others[:63]:
        watched.compile(text)
    watched.compile(first)
    watched.compile(others[63]).begin()  # others[0] makes room
    watched.compile(first).begin()
    assert watched.compiled == [first, *others]
    watched.compile(others[0]).begin()
    assert watched.compiled == [first, *others, others[0]]


def test_a_compiler_that_is_closed_fails_what_it_has_not_begun(watched):
    grammar = watched.compile(regex("a"))
    watched.close()
    with pytest.raises(GrammarFailed, match="closed"):
        grammar.begin()
    assert watched.compiled == []


@pytest.mark.parametrize(
    ("tokenizer", "width", "eos_ids", "problem"),
    [
        ("{}" + "x" * 10**6, WIDTH, [EOS], "tokenizer"),
        ("{" + "x" * 10**6, WIDTH, [EOS], "tokenizer"),
        (TEXT, 100, [EOS], "vocab size too small"),
        (TEXT, WIDTH, [], "eos_token"),
        (TEXT, WIDTH, [WIDTH], "out of range"),
    ],
)
def test_what_is_wrong_with_the_model_fails_its_grammars_in_few_words(
    tokenizer, width, eos_ids, problem
):
    compiler = GrammarCompiler(tokenizer, width, eos_ids)
    try:
        for _ in range(2):
            with pytest.raises(GrammarFailed, match=problem) as caught:
                compiler.compile(regex("a")).begin()
            assert len(str(caught.value)) < 500
    finally:
        compiler.close()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "Empty"),
        ("no grammar at all", "Expected"),
        (LLMatcher.grammar_from_lark("start: " + "x" * 5000), "unknown name"),
        (LLMatcher.grammar_from_json_schema('{"type": "' + "x" * 5000 + '"}'), "Invalid type"),
        (
            LLMatcher.grammar_from_json_schema('{"allOf":[{"type":"null"},{"type":"string"}]}'),
            "Unsatisfiable",
        ),
        (regex("(" * 3000), "regex"),
    ],
)
def test_what_is_wrong_with_a_grammar_is_said_in_few_words(compiler, text, problem):
    for _ in range(2):
        with pytest.raises(GrammarFailed, match=problem) as caught:
            compiler.compile(text).begin()
        assert len(str(caught.value)) < 500
        assert "\n" not in str(caught.value)
    assert compiler.compile(regex("a")).begin().allowed().any()


@pytest.mark.parametrize("eos_ids", [[EOS], [OTHER_EOS], [EOS, OTHER_EOS]])
def test_a_text_ends_with_the_tokens_that_the_model_ends_with(eos_ids):
    compiler = GrammarCompiler(TEXT, WIDTH, eos_ids)
    try:
        state = compiler.compile(regex("")).begin()
        assert torch.nonzero(state.allowed()).flatten().tolist() == eos_ids
    finally:
        compiler.close()


def test_the_size_of_other_threads_stacks_is_left_alone():
    before = threading.stack_size()
    try:
        for size in (0, 2**20, 2**26):
            threading.stack_size(size)
            GrammarCompiler(TEXT, WIDTH, [EOS]).close()
            assert threading.stack_size() == size
    finally:
        threading.stack_size(before)


_DEEP = """
import json, sys, threading
from compute.sampling import GrammarCompiler
from llguidance import LLMatcher

schema = {"type": "integer"}
for _ in range(100):
    schema = {"type": "array", "items": schema}
threading.stack_size(2**18)
compiler = GrammarCompiler(sys.stdin.read(), 300, [0])
compiler.compile(LLMatcher.grammar_from_json_schema(json.dumps(schema))).begin()
print("compiled")
"""


def test_a_deep_grammar_is_compiled_although_other_threads_have_small_stacks():
    """In a process of its own, which such a grammar takes down where the stack is small."""
    root = Path(__file__).parents[4]
    done = subprocess.run(
        [sys.executable, "-c", _DEEP],
        input=TEXT,
        capture_output=True,
        text=True,
        cwd=root,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "compiled\n"), done.stderr


def test_without_a_tokenizer_every_grammar_fails():
    with pytest.raises(GrammarFailed, match=r"tokenizer\.json"):
        NoGrammars().compile(json.dumps({})).begin()
