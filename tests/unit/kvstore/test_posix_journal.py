"""A journal's file: whole records, whatever happens to its end."""

from __future__ import annotations

import os

import pytest

from kvstore.posix_journal import PosixJournal

RECORDS = [b"one", b"", b"three" * 1000]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "journal"
    journal = PosixJournal(path)
    for record in RECORDS:
        journal.append(record)
    return path


def test_another_process_reads_what_was_written(path):
    assert list(PosixJournal(path).records()) == RECORDS


@pytest.mark.parametrize("lost", [1, 4, 5007, 5008])
def test_a_record_that_is_cut_off_does_not_count_and_is_written_over(path, lost):
    os.truncate(path, path.stat().st_size - lost)
    journal = PosixJournal(path)
    assert list(journal.records()) == RECORDS[:2]
    journal.append(b"new")
    assert list(PosixJournal(path).records()) == [*RECORDS[:2], b"new"]


def test_a_damaged_record_and_all_behind_it_do_not_count(path):
    data = bytearray(path.read_bytes())
    data[8] ^= 1
    path.write_bytes(data)
    assert list(PosixJournal(path).records()) == []


def test_replacing_is_all_or_nothing(path):
    journal = PosixJournal(path)

    def failing():
        yield b"new"
        raise OSError("no room")

    assert journal.replace(failing()) == 0
    assert list(PosixJournal(path).records()) == RECORDS
    assert journal.replace([b"new"]) == 8 + 3
    journal.append(b"more")
    assert list(PosixJournal(path).records()) == [b"new", b"more"]
    assert [each.name for each in path.parent.iterdir()] == ["journal"]


def test_a_journal_without_room_is_empty_until_it_is_replaced(path, monkeypatch):
    journal = PosixJournal(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: len(data) - 1)
        journal.append(b"lost")
    journal.append(b"after")
    assert list(PosixJournal(path).records()) == []
    journal.replace([b"anew"])
    journal.append(b"after")
    assert list(PosixJournal(path).records()) == [b"anew", b"after"]
