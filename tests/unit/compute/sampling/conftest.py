"""A compiler of grammars, for the tests of sampling."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from compute.sampling import GrammarCompiler
from tests.unit.compute.sampling.grammars import EOS, OTHER_EOS, WIDTH, make_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


@pytest.fixture(scope="session")
def compiler(tokenizer):
    made = GrammarCompiler(tokenizer.to_str(), WIDTH, [EOS, OTHER_EOS])
    yield made
    made.close()
