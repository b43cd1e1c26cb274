"""`quire fsck`: what it says and how it ends."""

from __future__ import annotations

import json

import pytest

from kvstore import audit
from kvstore.types import Finding


@pytest.fixture
def broken(busy):
    """A held block has a reference that nobody has."""
    counts = busy._attached.state.blocks.frames.ref_counts
    counts[counts.argmax()] += 1
    return busy


async def test_a_sound_pool_is_one_line(busy, address, quire):
    status, out, err = await quire("fsck", "--kvstore", address)
    assert (status, err) == (0, "")
    assert out == (
        f"{address}: all is well: 16 blocks (11 free, 2 cached, 3 held), 1 sequences, 1 pins.\n"
    )


async def test_no_pool_is_clean(address, quire):
    status, out, _ = await quire("fsck", "--kvstore", address)
    assert status == 0
    assert "no pool is attached yet" in out


async def test_findings_are_listed_and_stay(broken, address, quire):
    for _ in range(2):
        status, out, _ = await quire("fsck", "--kvstore", address)
        assert status == 1
        assert "references" in out
        assert "has 3 references, 2 are known" in out
        assert "1 finding. To repair: quire fsck --repair" in out


async def test_what_is_repaired_is_no_failure(broken, address, quire):
    status, out, _ = await quire("fsck", "--repair", "--kvstore", address)
    assert status == 0
    assert "1 finding, all repaired" in out
    assert broken.audit() == []


async def test_what_a_repair_leaves_is_a_failure(busy, address, quire, monkeypatch):
    stubborn = [Finding("tree", "a node\x1b[2J\nis dead"), Finding("pins", "[bold]")]
    monkeypatch.setattr(audit, "findings", lambda state: stubborn)
    status, out, _ = await quire("fsck", "--repair", "--kvstore", address)
    assert status == 1
    assert "2 findings, 2 left after the repair" in out
    assert "a node[2J is dead" in out
    assert "[bold]" in out  # is no markup


async def test_json_has_the_counts_and_the_findings(broken, address, quire):
    status, out, _ = await quire("fsck", "--json", "--kvstore", address)
    report = json.loads(out)
    assert status == 1
    assert (report["kvstore"], report["num_blocks"], report["num_held"]) == (address, 16, 3)
    assert [finding["kind"] for finding in report["findings"]] == ["references"]
    assert report["remaining_findings"] is None
    status, out, _ = await quire("fsck", "--json", "--repair", "--kvstore", address)
    assert status == 0
    assert json.loads(out)["remaining_findings"] == []


@pytest.mark.parametrize("nobody", ["127.0.0.1:9", "unix:/nonexistent/kv.sock", "nonsense"])
async def test_no_kvstore_is_one_line(quire, nobody):
    status, out, err = await quire("fsck", "--kvstore", nobody)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert nobody in err
    assert "Traceback" not in err
