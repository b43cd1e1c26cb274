"""Content keys: what they are made of, and that they stay what they are."""

from __future__ import annotations

import struct
from hashlib import sha256
from itertools import combinations

import pytest

from kvstore.content_keys import prefix_keys, root_key
from kvstore.types import Namespace

FINGERPRINT = bytes(range(32))
FULL = Namespace(FINGERPRINT, adapter="ä-1", tenant="acme", salt="s")
TOKENS = [0, 1, 2, 3, 4, 5, 6, 2**31 - 1, *range(100, 110)]

# Directories and followers elsewhere hold such keys: these must never change.
GOLDEN_ROOTS = {
    Namespace(FINGERPRINT): "8b5f70ec01418daf17909d6a60c0b58134d050d5b550d29534552cd38fe7a043",
    FULL: "7a9c4678d6a8d8f74f1e19fe7c2166601b155514cf485e2eb3e921a5c4c81a57",
}
GOLDEN_KEYS = [
    "422e344ad95dfbb27aafc64a812005ce11d137c83319da541af1e5799f0c6a53",
    "b6bf8c70c74abdd4079aea21d04b2000c4e4e5d1b2ce1c841e88807ad9e15f28",
]


def documented_root(parts: list[tuple[bytes, bytes]]) -> bytes:
    """docs/events.md, word for word."""
    data = b"quire block key 1"
    for name, value in parts:
        if value:
            data += struct.pack("<I", len(name)) + name + struct.pack("<I", len(value)) + value
    return sha256(data).digest()


@pytest.mark.parametrize("namespace", GOLDEN_ROOTS)
def test_a_root_key_is_what_it_has_always_been(namespace):
    assert root_key(namespace).hex() == GOLDEN_ROOTS[namespace]


def test_block_keys_are_what_they_have_always_been():
    assert [key.hex() for key in prefix_keys(FULL, TOKENS, 8)] == GOLDEN_KEYS


def test_keys_follow_the_documented_definition():
    parts = [
        (b"model_fingerprint", FINGERPRINT),
        (b"adapter", "ä-1".encode()),
        (b"tenant", b"acme"),
        (b"salt", b"s"),
    ]
    root = documented_root(parts)
    assert root_key(FULL) == root
    first = sha256(root + struct.pack("<8i", *TOKENS[:8])).digest()
    second = sha256(first + struct.pack("<8i", *TOKENS[8:16])).digest()
    assert prefix_keys(FULL, TOKENS, 8) == [first, second]


def test_namespaces_that_differ_only_in_which_part_holds_a_string_differ():
    """Fault C1."""
    spaces = [
        Namespace(b"m", adapter="x"),
        Namespace(b"m", tenant="x"),
        Namespace(b"m", salt="x"),
        Namespace(b"mx"),
        Namespace(b"m"),
        Namespace(b"m", adapter="xx"),
        Namespace(b"m", adapter="x", salt="x"),
        Namespace(b"m", adapter="x", tenant="x"),
        Namespace(b"", adapter="m", salt="x"),
        # The encoding of another part inside a value.
        Namespace(b"m", adapter="x\x04\0\0\0salt\x01\0\0\0x"),
    ]
    for one, other in combinations(spaces, 2):
        assert root_key(one) != root_key(other)
        assert prefix_keys(one, range(8), 8) != prefix_keys(other, range(8), 8)


def test_only_full_blocks_have_keys():
    assert prefix_keys(FULL, range(7), 8) == []
    assert len(prefix_keys(FULL, range(24), 8)) == 3


def test_a_key_names_the_whole_prefix_and_the_block_size():
    same_last = [[1] * 8 + [5] * 8, [2] * 8 + [5] * 8]
    one, other = (prefix_keys(FULL, tokens, 8)[1] for tokens in same_last)
    assert one != other
    assert prefix_keys(FULL, range(32), 16)[0] not in prefix_keys(FULL, range(32), 8)
