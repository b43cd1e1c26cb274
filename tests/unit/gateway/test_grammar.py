"""Grammars are compiled by the real library, in its own process."""

from __future__ import annotations

import asyncio
import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from gateway import grammar
from gateway.errors import InvalidField, QueueFull
from gateway.grammar import GrammarCompiler, Structure, StructureKind

EOS_ID = 256
JSON_SCHEMA, REGEX, GRAMMAR = StructureKind.JSON_SCHEMA, StructureKind.REGEX, StructureKind.GRAMMAR


@pytest.fixture
async def new_compiler(byte_model):
    compilers = []

    def make(eos_ids=(EOS_ID,), **options):
        path = byte_model / "tokenizer.json"
        compilers.append(GrammarCompiler(path, 258, eos_ids, **options))
        return compilers[-1]

    yield make
    for compiler in compilers:
        await compiler.close()


@pytest.fixture
def compiler(new_compiler):
    return new_compiler()


@pytest.fixture
def accepts(byte_model):
    """Whether a compiled grammar lets exactly this text through."""
    text = (byte_model / "tokenizer.json").read_text()
    tokenizer = LLTokenizer(text, n_vocab=258, eos_token=EOS_ID)

    def accepts(compiled, answer):
        matcher = LLMatcher(tokenizer, compiled, log_level=0)
        tokens = list(answer.encode())
        return matcher.consume_tokens(tokens) and matcher.is_accepting()

    return accepts


def schema(value):
    return Structure(JSON_SCHEMA, json.dumps(value), "response_format")


POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("structure", "good", "bad"),
    [
        (schema(POINT), '{"x":5}', '{"y":5}'),
        (grammar.json_object("f"), '{"a":[1,null]}', "[1]"),
        (Structure(REGEX, r"[0-9]{2}|x+", "f"), "xxx", "123"),
        (Structure(GRAMMAR, 'root ::= "a" tail\ntail ::= "b" | tail "c"', "f"), "abcc", "ac"),
        (Structure(GRAMMAR, 'start: "a" tail\ntail: "b" | tail "c"', "f"), "abcc", "ac"),
        (grammar.choice(["yes", 'n"o\n\\', "\x00\x7f é😀"], "f"), 'n"o\n\\', "ye"),
        (grammar.choice(["yes", 'n"o\n\\', "\x00\x7f é😀"], "f"), "\x00\x7f é😀", "yesyes"),
    ],
    ids=str,
)
async def test_each_form_lets_through_what_it_says(compiler, accepts, structure, good, bad):
    compiled = await compiler.compile(structure)
    assert accepts(compiled, good)
    assert not accepts(compiled, bad)


REFUSED = {
    "not JSON": Structure(JSON_SCHEMA, "{", "f"),
    "more than a schema": Structure(JSON_SCHEMA, "{} }, {}", "f"),
    "not a schema": schema([]),
    "unknown type": schema({"type": "text"}),
    "a keyword that is not built": schema({"not": {}}),
    "a reference outside": schema({"$ref": "http://localhost/x"}),
    "no value": schema({"type": "string", "enum": []}),
    "an impossible range": schema({"type": "integer", "minimum": 5, "maximum": 4}),
    "false": schema(False),
    "itself": schema({"$ref": "#"}),
    "a broken expression": Structure(REGEX, "[0-9", "f"),
    "an expression that nothing matches": Structure(REGEX, r"a[^\s\S]", "f"),
    "look-ahead": Structure(REGEX, "(?=a)b", "f"),
    "no grammar": Structure(GRAMMAR, "hello", "f"),
    "no root": Structure(GRAMMAR, 'a ::= "b"', "f"),
    "an unknown rule": Structure(GRAMMAR, "root ::= b", "f"),
    "an unknown rule in Lark": Structure(GRAMMAR, "start: b", "f"),
    "nothing but itself": Structure(GRAMMAR, 'start: start "a"', "f"),
    "no end": Structure(GRAMMAR, 'start: "a" start', "f"),
    "far too many states": Structure(REGEX, "(a{1000}){1000}{1000}", "f"),
    "half an escape": Structure(GRAMMAR, 'root ::= "\\', "f"),
    "empty lines": Structure(GRAMMAR, "\n" * 200_000, "f"),
    "brackets": Structure(GRAMMAR, "root ::= " + "(" * 20_000, "f"),
    "empty": Structure(REGEX, "", "f"),
    "too large": Structure(REGEX, "a" * (grammar.MAX_BYTES + 1), "f"),
}


@pytest.mark.parametrize("structure", REFUSED.values(), ids=REFUSED)
async def test_what_cannot_be_is_refused_with_its_option(compiler, structure):
    with pytest.raises(InvalidField) as caught:
        await compiler.compile(structure)
    assert caught.value.field == structure.field
    assert len(str(caught.value)) < 600
    assert await compiler.compile(Structure(REGEX, "a", "f"))


@pytest.mark.parametrize(("texts", "field"), [([], "f"), (["a"] * 1025, "f"), (["a", ""], "f[1]")])
def test_choices_that_are_none_are_refused(texts, field):
    with pytest.raises(InvalidField) as caught:
        grammar.choice(texts, "f")
    assert caught.value.field == field


def endless(num_rules):
    rules = [f'r{i}: "a{i}" r{(i + 1) % num_rules}?' for i in range(num_rules)]
    return Structure(GRAMMAR, "start: r0\n" + "\n".join(rules), "structured_outputs.grammar")


async def test_a_grammar_that_takes_the_library_down_takes_nothing_else(compiler):
    for _ in range(2):
        with pytest.raises(InvalidField, match="too complex") as caught:
            await compiler.compile(endless(5000))
        assert caught.value.field == "structured_outputs.grammar"
        assert await compiler.compile(Structure(REGEX, "a", "f"))


async def test_a_grammar_that_takes_too_long_is_given_up(new_compiler):
    compiler = new_compiler(time_limit=0.0)
    with pytest.raises(InvalidField, match="within 0 s"):
        await compiler.compile(Structure(REGEX, "a", "f"))


async def test_a_known_grammar_is_not_compiled_again(compiler):
    first = await compiler.compile(Structure(REGEX, "a+", "f"))
    await compiler.close()
    with pytest.raises(InvalidField):
        await compiler.compile(Structure(REGEX, "", "f"))
    assert await compiler.compile(Structure(REGEX, "a+", "other")) == first
    assert compiler._process is None


async def test_who_leaves_spoils_nothing_for_the_next(compiler):
    leaving = asyncio.create_task(compiler.compile(Structure(REGEX, "a", "f")))
    await asyncio.sleep(0.01)
    leaving.cancel()
    one, other = await asyncio.gather(
        compiler.compile(Structure(REGEX, "b", "f")), compiler.compile(Structure(REGEX, "c", "f"))
    )
    assert "/b/" in one
    assert "/c/" in other


async def test_too_many_to_compile_are_refused_and_the_others_are_not(compiler):
    asked = [
        asyncio.create_task(compiler.compile(Structure(REGEX, f"a{{{n}}}", "f")))
        for n in range(1, 41)
    ]
    got = await asyncio.gather(*asked, return_exceptions=True)
    refused = [one for one in got if isinstance(one, QueueFull)]
    assert len(refused) == 8
    assert sum(isinstance(one, str) for one in got) == 32
    assert await compiler.compile(Structure(REGEX, "a{40}", "f"))


async def test_a_model_that_cannot_end_has_no_structured_answers(new_compiler):
    with pytest.raises(InvalidField) as caught:
        await new_compiler(eos_ids=()).compile(Structure(REGEX, "a", "f"))
    assert caught.value.reason == "UNSUPPORTED_OPTION"
