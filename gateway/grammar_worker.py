"""The process that compiles grammars, for `gateway.grammar`.

It is run as a program of its own, with the path of tokenizer.json, the size of the
vocabulary and the end-of-sequence ids: a grammar of a few kilobytes can make the
library recurse until its stack ends, which no process survives. Each line of the
input is {"kind", "text"} in JSON, each line of the output {"grammar"} or {"error"};
before them comes a line that says it is ready.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
import sys
import threading
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

# Compute compiles what passed here once more. Its threads have 8 MiB, so that what
# fits into this has room to spare there.
_STACK_BYTES = 2 * 2**20
_MEMORY_BYTES = 4 * 2**30
_LARK_LINE = re.compile(r"[ \t]*(%llguidance\b|start[ \t]*:)")
_NOTHING = "nothing satisfies it"


class Refused(Exception):
    """The text says why."""


def compiled(tokenizer: LLTokenizer, kind: str, text: str) -> str:
    """llguidance's own form of a grammar that compiles and that some text satisfies.

    Raises Refused.
    """
    try:
        grammar = _converted(kind, text)
    except RecursionError:
        raise Refused("it is too deeply nested") from None
    except Exception as error:  # the library's converters raise plain Exception too
        raise Refused(f"it cannot be read: {error}") from None
    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise Refused(_reason(matcher))
    allowed = matcher.compute_bitmask()
    if matcher.is_error():
        is_empty = matcher.get_error().startswith("NoExtension")
        raise Refused(_NOTHING if is_empty else _reason(matcher))
    # Some grammars compile and then are too much for the library at the first token.
    matcher.consume_token(_lowest(allowed))
    if matcher.is_error():
        raise Refused(f"it cannot be followed: {_reason(matcher)}")
    return grammar


def _reason(matcher: LLMatcher) -> str:
    return str(matcher.get_error()).removesuffix("<non-verbose/>").rstrip()


def _lowest(allowed: bytes) -> int:
    """The first token that a mask allows; some one is."""
    index = next(index for index, byte in enumerate(allowed) if byte)
    return 8 * index + ((allowed[index] & -allowed[index]).bit_length() - 1)


def _converted(kind: str, text: str) -> str:
    if kind == "json_schema":
        json.loads(text)  # below it is pasted into a larger text as it is
        return LLMatcher.grammar_from_json_schema(text)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        texts = [json.dumps(one) for one in json.loads(text)]
        return LLMatcher.grammar_from_lark("start: " + " | ".join(texts))
    # Line by line: the library's own test takes quadratic time on empty lines.
    is_lark = any(map(_LARK_LINE.match, text.splitlines()))
    return LLMatcher.grammar_from_lark(text if is_lark else gbnf_to_lark(text))


def _answer(tokenizer: LLTokenizer, line: bytes) -> dict[str, str]:
    request = json.loads(line)
    try:
        return {"grammar": compiled(tokenizer, request["kind"], request["text"])}
    except Refused as refused:
        return {"error": str(refused)}


def main(path: str, vocab_size: str, *eos_ids: str) -> None:
    """Until the input ends."""
    with contextlib.suppress(OSError, ValueError):  # not every system has such a limit
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    threading.stack_size(_STACK_BYTES)
    text = Path(path).read_text(encoding="utf-8")
    tokenizer = LLTokenizer(text, n_vocab=int(vocab_size), eos_token=[int(i) for i in eos_ids])

    def serve(line: bytes) -> None:
        sys.stdout.write(json.dumps(_answer(tokenizer, line)) + "\n")
        sys.stdout.flush()

    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin.buffer:
        thread = threading.Thread(target=serve, args=(line,))
        thread.start()
        thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
