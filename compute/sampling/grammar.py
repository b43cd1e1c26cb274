"""Grammars by the llguidance library: which tokens may come next in a text."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from compute.errors import GrammarFailed

_MAX_KEPT = 64  # compiled grammars; a large schema takes megabytes
_MAX_ERROR = 400  # characters; the library quotes the grammar, or all of the tokenizer
# The library recurses. The gateway has compiled each grammar before, with far less.
_STACK_BYTES = 16 * 2**20


class GrammarCompiler:
    """Compiles for one tokenizer, in a thread of its own, and keeps the latest.

    Whoever runs steps waits only when a sequence is about to draw and its grammar is not
    ready.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos_ids: Iterable[int]) -> None:
        """`tokenizer` is the text of tokenizer.json, `vocab_size` the width of the logits,
        which may be more than its tokens. At least one token ends a text."""
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        # The thread starts with the first task.
        before = threading.stack_size(_STACK_BYTES)
        try:
            self._tokenizer: Future[LLTokenizer] = self._thread.submit(self._read, tokenizer)
        finally:
            threading.stack_size(before)
        self._kept: OrderedDict[str, Future[LLMatcher]] = OrderedDict()

    def compile(self, text: str) -> CompiledGrammar:
        """A grammar in the library's own form. Returns at once."""
        matcher = self._kept.get(text)
        if matcher is None:
            matcher = self._kept[text] = self._thread.submit(self._compile, text)
        self._kept.move_to_end(text)
        while len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        return CompiledGrammar(matcher, self._vocab_size, self._eos_ids)

    def close(self) -> None:
        """Stop compiling. Grammars that were not ready fail."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _read(self, tokenizer: str) -> LLTokenizer:
        return LLTokenizer(tokenizer, n_vocab=self._vocab_size, eos_token=sorted(self._eos_ids))

    def _compile(self, text: str) -> LLMatcher:
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._tokenizer.result(), text, log_level=0, limits=limits)
        matcher.compute_bitmask()  # the first one does much of the work
        return matcher


class CompiledGrammar:
    """A grammar at the beginning of a text, maybe still in the making."""

    def __init__(
        self, matcher: Future[LLMatcher], vocab_size: int, eos_ids: frozenset[int]
    ) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids

    def begin(self) -> MatcherState:
        """A state of its own. Waits for the compiler if it must.

        Raises GrammarFailed: there is no such grammar.
        """
        try:
            # Of whatever kind it is, a panic of the library's too: it concerns this
            # sequence alone.
            error = self._matcher.exception()
        except CancelledError:
            raise GrammarFailed("the compiler of grammars was closed") from None
        if error is not None:
            raise GrammarFailed(_short(f"the grammar could not be compiled: {error!r}"))
        matcher = self._matcher.result().deep_copy()
        state = MatcherState(matcher, self._vocab_size, self._eos_ids)
        state.check()
        return state


class MatcherState:
    """Where a text is in a grammar. A finished one goes on with end-of-sequence tokens only."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._num_ends = 0  # end-of-sequence tokens that the matcher has not seen

    def check(self) -> None:
        """Raises GrammarFailed if the grammar is broken."""
        if self._matcher.is_error():
            [reason, *_] = self._matcher.get_error().strip().splitlines() or [""]
            raise GrammarFailed(_short(f"the grammar cannot be followed: {reason}"))

    def allowed(self) -> torch.Tensor:
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self.check()
        bits = np.unpackbits(mask, count=self._vocab_size, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))

    def advance(self, token_id: int) -> None:
        self.check()  # a broken one counts as stopped
        if self._matcher.is_stopped() and token_id in self._eos_ids:
            self._num_ends += 1
        elif (
            self._num_ends
            or not 0 <= token_id < self._vocab_size
            or self._matcher.try_consume_tokens([token_id]) != 1
        ):
            self.check()
            raise GrammarFailed(f"the grammar does not allow token {token_id}")

    def go_back(self) -> None:
        if self._num_ends:
            self._num_ends -= 1
        else:
            self._matcher.rollback(1)


def _short(text: str) -> str:
    return text if len(text) <= _MAX_ERROR else text[:_MAX_ERROR] + "…"
