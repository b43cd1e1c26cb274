"""A tokenizer that can spell anything, and grammars for it."""

from __future__ import annotations

from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

EOS, OTHER_EOS, WIDTH = 0, 1, 300  # the logits are wider than the tokens are many
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "inner": {
            "type": "object",
            "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["n"],
            "additionalProperties": False,
        },
        "list": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "inner", "list"],
    "additionalProperties": False,
}
_SPECIAL = ["<end>", "<stop>", "<other>"]
_LONGER = ['{"', '":', "name", "mn", "mno", "no", "é", "}}"]
_MERGES = [("{", '"'), ('"', ":"), ("m", "n"), ("mn", "o"), ("n", "o"), ("Ã", "©"), ("}", "}")]


def make_tokenizer() -> Tokenizer:
    """One token per byte, a few longer ones, two that end a text and one more special one."""
    of_byte = bytes_to_unicode()
    longer = ["".join(of_byte[byte] for byte in text.encode()) for text in _LONGER]
    names = [*_SPECIAL[:2], *sorted(of_byte.values()), *longer, _SPECIAL[2]]
    made = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, _MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(_SPECIAL)
    return made


def bytes_of(tokenizer: Tokenizer) -> dict[int, bytes]:
    """What each token spells; the special ones, nothing."""
    bytes_by_name = {name: byte for byte, name in bytes_to_unicode().items()}
    return {
        token_id: bytes(bytes_by_name[character] for character in name)
        for name, token_id in tokenizer.get_vocab().items()
        if name not in _SPECIAL
    }


def regex(text: str) -> str:
    return LLMatcher.grammar_from_regex(text)
