"""What happened to sequences and pins, written down so that it outlives the process.

A record is a MessagePack array whose first item is its kind. Numbers that come in bulk are
little-endian integers in a byte string: 32 bits for tokens and blocks, 64 for the rest.
Sequences go by their serials, which are never used again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import astuple
from typing import Any

import msgpack

from kvstore.kill_points import Reached, ignore
from kvstore.pin_book import Pin
from kvstore.ports import JournalFile
from kvstore.sequences import Sequence
from kvstore.types import ExtendedSequence, Namespace, PoolHandle

SEQUENCES, FORK, EXTEND, COMMIT, TRUNCATE, CLOSE = range(6)
NAMESPACE, PIN, UNPIN, EPOCH, POOL = range(6, 11)

# The journal is written anew when it has grown by this much, or by as much as it had then.
_MOST_GROWTH = 32 << 20
# While there is no room for it, it is tried again after this much.
_NEXT_TRY = 256 << 10

_pack = msgpack.Packer().pack


class Journal:
    """Appends a record per change. `snapshot` gives the records of all that there is."""

    def __init__(self, file: JournalFile, reached: Reached = ignore) -> None:
        self._file = file
        self._reached = reached
        self.snapshot: Callable[[], Iterable[bytes]] = list
        self.num_records = 0  # that were appended
        self._grown = self._written = 0
        self._is_whole = True  # False: there was no room for a record

    def sequences(self, sequences: Iterable[Sequence]) -> None:
        """All there is to know of these sequences, new ones or changed ones."""
        self._append("sequences", sequences_record(sequences))

    def fork(self, forks: Iterable[tuple[Sequence, Sequence]]) -> None:
        """(source, fork) each, in the order in which they were made."""
        items = [
            (source.serial, fork.serial, fork.sequence_id, fork.epoch, len(fork.tokens))
            for source, fork in forks
        ]
        self._append("fork", _pack((FORK, items)))

    def extend(
        self, ends: list[int], serials: list[int], answers: Iterable[ExtendedSequence]
    ) -> None:
        """`ends`: serial and length in turn. `serials` of those that got blocks."""
        tables: list[int] = []
        for serial, one in zip(serials, answers, strict=True):
            tables += (serial, one.first_index, len(one.block_ids), *one.block_ids)
        self._append("extend", _pack((EXTEND, _bulk(ends), _bulk(tables))))

    def commit(self, commits: list[tuple[int, int, array[int], bytes | None]]) -> None:
        """(serial, computed tokens, new tokens, driver's state or None) each."""
        tokens = array("i")
        numbers: list[int] = []
        states = []
        for serial, num_computed, new, driver_state in commits:
            numbers += (serial, num_computed, len(new))
            tokens += new
            if driver_state is not None:
                states.append((serial, driver_state))
        self._append("commit", _pack((COMMIT, _bulk(numbers), tokens.tobytes(), states)))

    def truncate(self, cuts: list[tuple[int, int]]) -> None:
        """(serial, length) each."""
        self._append("truncate", _pack((TRUNCATE, cuts)))

    def close(self, serials: list[int]) -> None:
        if serials:
            self._append("close", _pack((CLOSE, serials)))

    def namespace(self, number: int, namespace: Namespace) -> None:
        """Frame records call the namespace by this number from now on."""
        self._append("namespace", namespace_record(number, namespace))

    def pin(self, pin: Pin) -> None:
        """A new pin, or a new lease of one."""
        self._append("pin", pin_record(pin))

    def unpin(self, pin_ids: list[str]) -> None:
        self._append("unpin", _pack((UNPIN, pin_ids)))

    def epoch(self, epoch: int) -> None:
        """The driver's from now on, who has what its predecessors had; 0: there is none."""
        self._append("epoch", epoch_record(epoch))

    def rewrite(self) -> None:
        """Replace all records by a snapshot."""
        self._reached("journal.rewrite.before")
        self._written = self._file.replace(self.snapshot())
        self._is_whole = self._written > 0
        self._grown = 0
        self._reached("journal.rewrite.after")

    def _append(self, kind: str, record: bytes) -> None:
        self._reached(f"journal.{kind}.before")
        self._is_whole &= self._file.append(record)
        self.num_records += 1
        self._reached(f"journal.{kind}.after")
        self._grown += len(record)

    @property
    def is_whole(self) -> bool:
        """The next process would find everything."""
        return self._is_whole

    def mend(self) -> None:
        """Write a journal anew that there was no room for, if there is some now."""
        if not self._is_whole:
            self.rewrite()

    def tidy(self) -> None:
        """Rewrite the journal if it has grown too long. Called between operations."""
        if self._grown > (max(_MOST_GROWTH, self._written) if self._is_whole else _NEXT_TRY):
            self.rewrite()


def pool_record(handle: PoolHandle, num_host_blocks: int) -> bytes:
    """What the journal is for. The first record."""
    layout = handle.layout
    sizes = (layout.block_size, layout.num_blocks, num_host_blocks)
    return bytes(_pack((POOL, astuple(layout.shape), sizes, handle.generation)))


def sequences_record(sequences: Iterable[Sequence]) -> bytes:
    items = [
        (
            one.serial,
            one.sequence_id,
            tuple(one.chain.namespace),
            one.tokens.tobytes(),
            one.num_prompt_tokens,
            one.num_cached_tokens,
            one.block_ids.tobytes(),
            one.length,
            one.num_computed,
            one.epoch,
            one.driver_state,
            one.group,
            one.num_forked_blocks,
            one.sources.tobytes(),
            one.first_target,
            one.is_suspended,
            one.host_ids.tobytes(),
            one.has_host_tail,
        )
        for one in sequences
    ]
    return bytes(_pack((SEQUENCES, items)))


def namespace_record(number: int, namespace: Namespace) -> bytes:
    return bytes(_pack((NAMESPACE, number, tuple(namespace))))


def pin_record(pin: Pin) -> bytes:
    item = (
        pin.pin_id,
        pin.owner,
        tuple(pin.namespace),
        pin.tokens.tobytes(),
        pin.priority,
        pin.expires_at,
        pin.epoch,
        pin.num_blocks,
    )
    return bytes(_pack((PIN, item)))


def epoch_record(epoch: int) -> bytes:
    return bytes(_pack((EPOCH, epoch)))


def unpack(record: bytes) -> Any:
    """The items of a record. Raises ValueError if it is none."""
    return msgpack.unpackb(record, use_list=False)


def _bulk(numbers: list[int]) -> bytes:
    return array("q", numbers).tobytes()
