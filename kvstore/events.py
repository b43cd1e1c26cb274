"""Numbered events of a pool: which blocks can be found now, and which no longer."""

from __future__ import annotations

import enum
import secrets
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.block_runs import BlockRun, TreeWalk, end_of_chain
from kvstore.content_keys import KEY_BYTES
from kvstore.errors import EventsTooOld, InvalidRequest
from kvstore.key_table import KeyTable, PoolSnapshot
from kvstore.prefix_tree import TOKEN_BYTES, Chain, PrefixTree
from kvstore.types import BlockId, Namespace

# A longer run of blocks makes several events: the keys of one are computed in one go, in
# about a millisecond, and go into one message.
BLOCKS_PER_EVENT = 1024

# Blocks that the events in the buffers are about, about 110 bytes each. An event counts as
# some more of them, for the memory that it takes besides.
_CAPACITY = 1 << 18
_EVENT_WEIGHT = 8

# What an event costs besides the digests, in digests.
_EVENT_COST = 32


class EvictionCause(enum.Enum):
    """Why blocks cannot be found any more."""

    ROOM = enum.auto()  # their frames were needed
    QUOTA = enum.auto()  # their tenant needed them for others of its own
    PREFIX = enum.auto()  # those before them in the prefix went
    MOVED = enum.auto()  # they are, or will be, found in other blocks


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks can be found; `keys` are theirs in a row."""

    number: int
    parent_key: bytes
    block_ids: array[int]
    keys: bytes
    token_data: bytes


@dataclass(frozen=True, slots=True)
class BlocksEvicted:
    number: int
    keys: bytes
    cause: EvictionCause


@dataclass(frozen=True, slots=True)
class PoolCleared:
    number: int


PoolEvent = BlocksStored | BlocksEvicted | PoolCleared


@dataclass(slots=True)
class _Evicted:
    block_ids: array[int]
    cause: EvictionCause


@dataclass(slots=True)
class _Moved:
    block_ids: array[int]
    new_ids: array[int]


@dataclass(slots=True)
class _Arrived:
    block_ids: array[int]


_Record = BlockRun | _Evicted | _Moved | _Arrived | None  # None: the pool was cleared


class EventLog:
    """The events of one pool, in order, and the keys that go with them.

    States: off, filling, on, closed. While it is off, the pool's calls only count. `start`
    makes it fill: from then on the pool's calls append records, and `advance` first goes
    through what the tree holds already, then through the records, and makes events of them,
    keys included; a bounded piece of work at a time. When its buffers are full it forgets
    the oldest events; if even records would have to go, because nobody advances, it turns
    itself off.

    Numbers begin at 1, grow by 1 and go on while the log is off. `epoch` is random: another
    pool has another one. Not thread-safe: the event loop that owns the pool owns its log.
    """

    def __init__(
        self, tree: PrefixTree, num_blocks: int, block_size: int, *, moves: bool = False
    ) -> None:
        """`moves`: contents go to and fro between blocks."""
        self.epoch = secrets.randbelow(2**64 - 1) + 1
        self.number = 0  # of the last event, keyed or not
        self.capacity = _CAPACITY
        self.block_size = block_size
        self.is_closed = False
        # Called when there are records again; they must do next to nothing.
        self.wakers: set[Callable[[], None]] = set()
        self._tree, self._num_blocks, self._moves = tree, num_blocks, moves
        self._block_bytes = block_size * TOKEN_BYTES
        self._table: KeyTable | None = None  # None: the log is off
        self._walk: TreeWalk | None = None  # over what the tree held at the start
        self._run: BlockRun | None = None  # of that walk, not done yet
        self._records: deque[_Record] = deque()
        self._at = 0  # blocks of the run, or of the first record, that are done
        self._events: deque[PoolEvent] = deque()
        self._num_keyed = 0  # number of the last event that is in the table
        self._first_known = 0  # number at which the table is complete
        self._weight = 0  # of records and events

    # --- what the pool tells ------------------------------------------------

    def stored(self, chain: Chain, block_ids: array[int], token_data: bytes) -> None:
        """The last blocks of a chain can be found now; the end of `token_data` is theirs.

        The log keeps the array, here and below.
        """
        count = len(block_ids)
        self.number += -(-count // BLOCKS_PER_EVENT)
        if self._table is not None:
            data = token_data[-count * self._block_bytes :]
            self._append(end_of_chain(chain, block_ids, data), count)

    def evicted(self, block_ids: array[int], cause: EvictionCause) -> None:
        """These blocks cannot be found any more."""
        count = len(block_ids)
        self.number += -(-count // BLOCKS_PER_EVENT)
        if self._table is not None and count:
            self._append(_Evicted(block_ids, cause), count)

    def moved(self, block_ids: array[int], new_ids: array[int]) -> None:
        """What was in these blocks goes to others, and is found once it has `arrived`."""
        count = len(block_ids)
        self.number += -(-count // BLOCKS_PER_EVENT)
        if self._table is not None:
            self._append(_Moved(block_ids, new_ids), count)

    def arrived(self, block_ids: array[int]) -> None:
        """Blocks that follow each other can be found again, where they were moved to."""
        count = len(block_ids)
        self.number += -(-count // BLOCKS_PER_EVENT)
        if self._table is not None:
            self._append(_Arrived(block_ids), count)

    def cleared(self) -> None:
        """No block can be found any more."""
        self.number += 1
        if self._table is not None:
            self._append(None, 0)

    def close(self) -> None:
        """The pool is gone. Watchers learn that it was cleared, and then that it ended."""
        self.cleared()
        self.is_closed = True
        self._wake()

    # --- what watchers ask --------------------------------------------------

    @property
    def is_filling(self) -> bool:
        """A snapshot has to wait: `advance` has not yet been through the tree."""
        return self._walk is not None or self._num_keyed < self._first_known

    def start(self) -> None:
        """Turn the log on, if it is off."""
        if self._table is None and not self.is_closed:
            self._table = KeyTable(self._num_blocks, self.block_size)
            self._walk = TreeWalk(self._tree, self._num_blocks)
            self._num_keyed = self._first_known = self.number
            while self._moves and self._walk is not None:
                # In one go: what moves while we walk could not be told apart later.
                self._fill(self._table, self._walk)

    def advance(self, budget: int = BLOCKS_PER_EVENT) -> bool:
        """Do some of the work, until it cost as much as the keys of `budget` blocks.

        Whether there is more to do. The default takes about a millisecond.
        """
        while budget > 0 and self._table is not None:
            if self._walk is not None:
                budget -= self._fill(self._table, self._walk)
            elif self._records:
                budget -= self._make_event(self._table)
            else:
                return False
        return self._walk is not None or bool(self._records)

    def snapshot(self, with_tokens: bool = False) -> PoolSnapshot:
        """All findable blocks, as the last event whose keys are known has left them.

        Raises:
            EventsTooOld: the log has turned itself off. Start it again.
        """
        if self._table is None or self.is_filling:
            raise EventsTooOld(after=0, oldest=self.number + 1)
        return self._table.snapshot(self._num_keyed, with_tokens)

    def read(self, after: int, most: int) -> list[PoolEvent]:
        """Up to `most` events after the number `after`, as far as their keys are known.

        Raises:
            InvalidRequest: there is no such number yet.
            EventsTooOld: the next event has been forgotten.
        """
        if not 0 <= after <= self.number:
            raise InvalidRequest("after_number", f"{after} is not from 0 to {self.number}")
        last = self._num_keyed if self._table is not None else self.number
        oldest = last + 1 - len(self._events)
        if after + 1 < oldest:
            raise EventsTooOld(after=after, oldest=oldest)
        first = after + 1 - oldest
        return [self._events[i] for i in range(first, min(first + most, len(self._events)))]

    # --- parts --------------------------------------------------------------

    def _append(self, record: _Record, num_blocks: int) -> None:
        self._records.append(record)
        num_events = -(-num_blocks // BLOCKS_PER_EVENT) or 1
        self._weight += num_blocks + num_events * _EVENT_WEIGHT
        while self._weight > self.capacity and self._events:
            self._weight -= _weight(self._events.popleft())
        if self._weight > self.capacity:
            self._turn_off()
            self._wake()
        elif len(self._records) == 1:
            self._wake()

    def _fill(self, table: KeyTable, walk: TreeWalk) -> int:
        """Take a run of the tree into the table, or a part of it. What that cost, in blocks.

        The tree changes while we walk. What has changed since the start is in the records,
        so the table is right once all records up to the end of the walk have been replayed:
        a block whose records have not all been replayed may be missing or wrong until then.
        """
        if self._run is None:
            self._run = walk.step()
        if self._run is None:
            self._walk, self._first_known = None, self.number
            return 1
        before, ids, data = self._piece_of(self._run)
        table.add(before, ids, data)
        if self._run.is_arriving:
            table.remove(ids)
        if self._is_last_piece(len(self._run.block_ids)):
            self._run = None
        return len(ids) + _EVENT_COST

    def _make_event(self, table: KeyTable) -> int:
        """Make an event of the next record, or of a part of it. What that cost, in blocks."""
        record = self._records[0]
        replays = self.is_filling
        self._num_keyed += 1
        event = self._event(table, record)
        weight = _weight(event)
        if self._is_last_piece(0 if record is None else len(record.block_ids)):
            self._records.popleft()
        if replays:
            self._weight -= weight
        else:
            self._events.append(event)
        return weight + _EVENT_COST

    def _event(self, table: KeyTable, record: _Record) -> PoolEvent:
        number = self._num_keyed
        if record is None:
            table.clear()
            return PoolCleared(number)
        if isinstance(record, _Evicted):
            ids = record.block_ids[self._at : self._at + BLOCKS_PER_EVENT]
            return BlocksEvicted(number, table.remove(ids), record.cause)
        if isinstance(record, _Moved):
            piece = slice(self._at, self._at + BLOCKS_PER_EVENT)
            keys = table.move(record.block_ids[piece], record.new_ids[piece])
            return BlocksEvicted(number, keys, EvictionCause.MOVED)
        if isinstance(record, _Arrived):
            ids = record.block_ids[self._at : self._at + BLOCKS_PER_EVENT]
            return BlocksStored(number, *table.show(ids))
        before, ids, data = self._piece_of(record)
        parent_key, keys = table.add(before, ids, data)
        return BlocksStored(number, parent_key, ids, keys, data)

    def _piece_of(self, run: BlockRun) -> tuple[BlockId | Namespace, array[int], bytes]:
        """The next BLOCKS_PER_EVENT blocks of a run."""
        first, size = self._at, self._block_bytes
        end = first + BLOCKS_PER_EVENT
        before = run.block_ids[first - 1] if first else run.before
        return before, run.block_ids[first:end], run.token_data[first * size : end * size]

    def _is_last_piece(self, num_blocks: int) -> bool:
        """Go on to the next piece of so many blocks."""
        self._at += BLOCKS_PER_EVENT
        if self._at < num_blocks:
            return False
        self._at = 0
        return True

    def _turn_off(self) -> None:
        self._table = self._walk = self._run = None
        self._records.clear()
        self._events.clear()
        self._at = self._weight = 0
        self._first_known = self._num_keyed

    def _wake(self) -> None:
        for wake in self.wakers:
            wake()


def _weight(event: PoolEvent) -> int:
    keys = b"" if isinstance(event, PoolCleared) else event.keys
    return len(keys) // KEY_BYTES + _EVENT_WEIGHT
