"""Names of blocks by what is in them: equal in every process and on every machine.

A key is a chain of SHA-256 digests, defined byte for byte in docs/events.md:

    root  = SHA-256("quire block key 1" · parts of the namespace that are not empty)
    key_i = SHA-256(key_{i-1} · tokens of block i as little-endian int32), key_{-1} = root

Keys name blocks to others: directories, events. A hit never rests on them; the prefix tree
compares the tokens themselves.
"""

# SHA-256 and not BLAKE2b: every language's standard library has it and processors have
# instructions for it. A digest of a block costs the interpreter more than the hash.

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

from kvstore.types import Namespace

KEY_BYTES = 32

# No digest begins with this but by a chance of 2^-136, so no block can pass for a root.
_ROOT_TAG = b"quire block key 1"
_LENGTH_BYTES = 4


def root_key(namespace: Namespace) -> bytes:
    """What stands before the first block of a namespace.

    Every part goes in with its name and both lengths, so that no part can imitate another
    one. Empty parts are left out: a part that is added to the namespace later changes no
    key of those who do not use it.
    """
    digest = sha256(_ROOT_TAG)
    for name, value in namespace._asdict().items():
        if value:
            digest.update(_with_length(name.encode()))
            digest.update(_with_length(_to_bytes(value)))
    return digest.digest()


def chained_keys(parent_key: bytes, token_data: bytes, block_bytes: int) -> bytes:
    """The keys of consecutive blocks, one after the other, from the key before them.

    `token_data` are the tokens of whole blocks of `block_bytes` bytes each, in the byte
    order of the machines that we run on, which is little-endian.
    """
    key, keys = parent_key, bytearray()
    for at in range(0, len(token_data), block_bytes):
        key = sha256(key + token_data[at : at + block_bytes]).digest()
        keys += key
    return bytes(keys)


def prefix_keys(namespace: Namespace, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """The keys of the full blocks of a prompt: what to look up in a directory."""
    num_tokens = len(token_ids) // block_size * block_size
    data = array("i", token_ids[:num_tokens]).tobytes()
    return split_keys(chained_keys(root_key(namespace), data, block_size * 4))


def split_keys(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def _with_length(value: bytes) -> bytes:
    return len(value).to_bytes(_LENGTH_BYTES, "little") + value


def _to_bytes(value: bytes | str) -> bytes:
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
