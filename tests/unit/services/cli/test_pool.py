"""`quire pool`: one screen of a pool, and where its kvstore is found."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from io import StringIO

import pytest
from rich.console import Console

from kvstore.types import PoolStats
from services.cli import pool, runtime_folder
from services.cli.kvstore_client import KvStoreSilent, address_of
from services.cli.pool_screen import PoolView


async def test_a_screen_shows_counts_tenants_pins_and_sequences(busy, address, quire):
    status, out, err = await quire("pool", "--kvstore", address)
    assert (status, err) == (0, "")
    for text in (
        "pinned 2  █ other held 1  ▒ cached 2  · free 11  of 16",
        "0.0% of 40 prompt tokens",
        "4 slots",
        "0 of 1 sequence now",
    ):
        assert text in out
    rows = [line.split() for line in out.splitlines()]
    assert ["acme", "4", "12", "3", "2", "2", "0.0%"] in rows
    assert ["a", "client", "resident", "20", "20", "3"] in rows
    pin = next(row for row in rows if row[:3] == ["p", "me", "acme"])
    assert pin[-2:] == ["16", "100.0%"]
    assert max(map(len, out.splitlines())) <= 80


async def test_without_a_pool_there_is_little_to_see(address, quire):
    status, out, _ = await quire("pool", "--kvstore", address)
    assert status == 0
    assert "No compute worker has attached a pool yet." in out


async def test_json_has_every_counter(busy, address, quire):
    status, out, _ = await quire("pool", "--json", "--kvstore", address)
    shown = json.loads(out)
    stats = busy.stats()
    assert status == 0
    assert shown["kvstore"] == address
    assert shown["stats"]["num_free"] == stats.num_free
    assert shown["stats"]["tenants"][0]["tenant"] == "acme"
    assert [pin["pin_id"] for pin in shown["pins"]] == ["p"]
    assert [one["sequence_id"] for one in shown["sequences"]] == ["a"]


async def test_watching_goes_on_until_it_is_interrupted(busy, address, quire, monkeypatch):
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(pool.time, "sleep", pause)
    status, out, _ = await quire("pool", "--watch", "--json", "--kvstore", address)
    assert (status, len(out.splitlines())) == (0, 3)


def test_a_kvstore_that_falls_silent_may_come_back_while_it_is_watched(monkeypatch):
    looks = iter(["the kvstore is gone", "", KeyboardInterrupt])

    class Changing:
        address = "somewhere"

        def stats(self):
            trouble = next(looks)
            if trouble is KeyboardInterrupt:
                raise trouble
            if trouble:
                raise KvStoreSilent(trouble)
            return PoolStats(num_blocks=77, num_free=77)

        def pins(self):
            return []

        def sequences(self, most):
            return []

    monkeypatch.setattr(pool.time, "sleep", lambda seconds: None)
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=80, height=30)
    with pytest.raises(KeyboardInterrupt):
        pool._watch(Changing(), PoolView("somewhere", PoolStats(), [], []), console)
    shown = screen.getvalue()
    assert shown.index("the kvstore is gone") < shown.index("of 77")
    assert "the kvstore is gone" not in shown[shown.index("of 77") :]


async def test_no_kvstore_is_one_line(quire):
    status, out, err = await quire("pool", "--kvstore", "127.0.0.1:9")
    assert (status, out) == (1, "")
    assert err.count("\n") == 1
    assert "--kvstore" in err


def test_the_latest_supervisor_that_runs_is_found_without_its_address(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert address_of("") == "127.0.0.1:50051"
    with runtime_folder.runtime_folder() as first:
        assert address_of("") == f"unix:{first}/kvstore.sock"
        with runtime_folder.runtime_folder() as second:
            assert runtime_folder.running_folders() == [second, first]
            assert address_of("") == f"unix:{second}/kvstore.sock"
            assert address_of("host:1") == "host:1"
    assert address_of("") == "127.0.0.1:50051"


@pytest.fixture
def abandoned(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "quire-left"
    folder.mkdir()
    (folder / "lock").touch()
    return folder


def test_a_folder_whose_supervisor_is_gone_is_none(abandoned):
    assert runtime_folder.running_folders() == []
    assert abandoned.exists()


def test_a_folder_of_somebody_else_is_none(abandoned, monkeypatch):
    with (abandoned / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert runtime_folder.running_folders() == [abandoned]
        monkeypatch.setattr(os, "getuid", lambda: abandoned.stat().st_uid + 1)
        assert runtime_folder.running_folders() == []
