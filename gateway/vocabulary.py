"""The bytes behind each token, for the two families of tokenizers that exist.

Byte-level: each character of a token's name stands for one byte, by GPT-2's
table. SentencePiece: the name is the text with U+2581 for a space, and <0x0A> is
a single byte.
"""

from __future__ import annotations

import re
from typing import Any

from gateway.errors import ModelFilesInvalid

_SPACE = "\u2581"
_BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 stands for itself, the rest for U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


class Vocabulary:
    """Token id to bytes, found on first use and remembered."""

    def __init__(self, splitter: Any, description: dict[str, Any]) -> None:
        """`description` is tokenizer.json. Raises ModelFilesInvalid for an unknown decoder."""
        self._splitter = splitter
        self._known: dict[int, bytes] = {}
        added = splitter.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        # Longest first: one name may contain another.
        names = {added[i].content for i in self._special_ids}
        self.special_texts = tuple(sorted(names, key=lambda name: (-len(name), name)))
        decoders = _decoders(description.get("decoder"))
        kinds = {decoder["type"] for decoder in decoders}
        self._is_byte_level = "ByteLevel" in kinds
        if not self._is_byte_level and not kinds & {"Metaspace", "ByteFallback"}:
            raise ModelFilesInvalid(f"tokenizer.json: cannot decode {sorted(kinds)}")
        self._strips_first_space = any(map(_strips_first_space, decoders))

    @property
    def strips_first_space(self) -> bool:
        return self._strips_first_space

    def bytes_of(self, token_id: int) -> bytes:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._look_up(token_id)
        return found

    def shown_bytes_of(self, token_id: int) -> bytes:
        """The same, but the name of a special token."""
        if token_id in self._special_ids:
            return bytes(self._splitter.id_to_token(token_id).encode())
        return self.bytes_of(token_id)

    def _look_up(self, token_id: int) -> bytes:
        name = self._splitter.id_to_token(token_id)
        if name is None or token_id in self._special_ids:
            return b""
        if self._is_byte_level:
            if all(character in _ALPHABET for character in name):
                return bytes(_ALPHABET[character] for character in name)
            return bytes(name.encode())  # an added token is plain text
        byte = _BYTE_NAME.fullmatch(name)
        return bytes([int(byte[1], 16)]) if byte else bytes(name.replace(_SPACE, " ").encode())


def _decoders(description: dict[str, Any] | None) -> list[dict[str, Any]]:
    if description is None:
        return []
    if description["type"] == "Sequence":
        return [one for part in description["decoders"] for one in _decoders(part)]
    return [description]


def _strips_first_space(decoder: dict[str, Any]) -> bool:
    if decoder["type"] == "Metaspace":
        return bool(decoder.get("prepend_scheme", "always") != "never")
    return bool(decoder["type"] == "Strip" and decoder["content"] == " " and decoder["start"] > 0)
