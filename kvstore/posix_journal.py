"""A journal in shared memory: what one process wrote is there for the next."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

# Before each record: its length and its CRC-32.
_FRAME = struct.Struct("<II")


class PosixJournal:
    """Records one after the other in a file. Opened by its only writer.

    A record is written with one call, which a kill may cut short: what is half there at
    the end does not count. A journal that could not be written, for want of memory, is
    empty from then on, until it is replaced: half of the truth is worse than none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self.is_broken = False

    def append(self, record: bytes) -> bool:
        if self.is_broken:
            return False
        whole = _framed(record)
        try:
            written = os.write(self._descriptor, whole)
        except OSError:
            written = 0
        if written < len(whole):
            self.is_broken = True
            os.ftruncate(self._descriptor, 0)
        return not self.is_broken

    def records(self) -> Iterator[bytes]:
        data = self._path.read_bytes()
        at = 0
        while at + _FRAME.size <= len(data):
            length, checksum = _FRAME.unpack_from(data, at)
            record = data[at + _FRAME.size : at + _FRAME.size + length]
            if len(record) < length or zlib.crc32(record) != checksum:
                break
            yield record
            at += _FRAME.size + length
        if at < len(data):
            os.ftruncate(self._descriptor, at)

    def replace(self, records: Iterable[bytes]) -> int:
        new = self._path.with_name(self._path.name + "-new")
        size = 0
        try:
            with new.open("wb") as file:
                for record in records:
                    size += file.write(_framed(record))
        except OSError:
            new.unlink(missing_ok=True)
            return 0  # as it was; there will be another try
        new.chmod(0o600)
        new.rename(self._path)
        os.close(self._descriptor)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND)
        self.is_broken = False
        return size


def _framed(record: bytes) -> bytes:
    return _FRAME.pack(len(record), zlib.crc32(record)) + record
