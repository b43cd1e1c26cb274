"""Which blocks can be found, under which key, at one number of the event log."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.content_keys import KEY_BYTES, chained_keys, root_key
from kvstore.prefix_tree import TOKEN_BYTES
from kvstore.types import BlockId, Namespace

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """All blocks that could be found after the event `number`, in no order.

    block_ids [n] int32, keys and parent_keys [n, 32] uint8, tokens [n, block_size] int32 or
    None if nobody asked for them
    """

    number: int
    block_ids: NDArray[np.int32]
    keys: Bytes
    parent_keys: Bytes
    tokens: NDArray[np.int32] | None


class KeyTable:
    """The key of each findable block, the key before it, and its tokens.

    A block's parent is findable as long as the block is, so that a key always follows from
    the table and the block's own tokens.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        self._is_findable = np.zeros(num_blocks, np.bool_)
        self._keys: Bytes = np.zeros((num_blocks, KEY_BYTES), np.uint8)
        self._parents: Bytes = np.zeros((num_blocks, KEY_BYTES), np.uint8)
        self._tokens = np.zeros((num_blocks, block_size), np.int32)

    def add(
        self, before: BlockId | Namespace, block_ids: array[int], token_data: bytes
    ) -> tuple[bytes, bytes]:
        """Consecutive blocks are findable now. The key before them, and theirs in a row.

        `before` is the block before them, or their namespace if there is none.
        """
        parent = self._key(before) if isinstance(before, int) else root_key(before)
        keys = chained_keys(parent, token_data, self._block_bytes)
        ids = np.array(block_ids, np.int32)
        self._keys[ids] = _rows(keys)
        self._parents[ids] = _rows(parent + keys[:-KEY_BYTES])
        self._tokens[ids] = np.frombuffer(token_data, np.int32).reshape(len(ids), -1)
        self._is_findable[ids] = True
        return parent, keys

    def remove(self, block_ids: array[int]) -> bytes:
        """These blocks are not findable any more. The keys of those that were, in a row."""
        ids = np.array(block_ids, np.int32)
        found = ids[self._is_findable[ids]]
        self._is_findable[ids] = False
        return self._keys[found].tobytes()

    def move(self, block_ids: array[int], new_ids: array[int]) -> bytes:
        """What these blocks have is on its way to others. The keys that are not found now."""
        old, new = np.array(block_ids, np.int32), np.array(new_ids, np.int32)
        for rows in (self._keys, self._parents, self._tokens):
            rows[new] = rows[old]
        return self.remove(block_ids)

    def show(self, block_ids: array[int]) -> tuple[bytes, array[int], bytes, bytes]:
        """What was moved to these blocks, one after the other, is there.

        The key before them, the blocks, their keys and their tokens.
        """
        ids = np.array(block_ids, np.int32)
        self._is_findable[ids] = True
        keys, tokens = self._keys[ids].tobytes(), self._tokens[ids].tobytes()
        return self._parents[ids[0]].tobytes(), block_ids, keys, tokens

    def clear(self) -> None:
        """No block is findable any more."""
        self._is_findable[:] = False

    def snapshot(self, number: int, with_tokens: bool) -> PoolSnapshot:
        """A copy of everything, the tokens only if asked for."""
        ids: NDArray[Any] = np.flatnonzero(self._is_findable).astype(np.int32)
        tokens = self._tokens[ids] if with_tokens else None
        return PoolSnapshot(number, ids, self._keys[ids], self._parents[ids], tokens)

    def _key(self, block_id: BlockId) -> bytes:
        key: bytes = self._keys[block_id].tobytes()
        return key


def _rows(keys: bytes) -> Bytes:
    return np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)
