"""docs/faults.md names tests that exist, and leaves no fault out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/faults.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`((?:unit|contract|integration)/[\w/]+\.py)(?:::(\w+))?`", TEXT)))


def test_every_fault_of_the_cache_of_scheduling_and_of_processes_has_a_row():
    rows = re.findall(r"^\| ([CSP]\d+) \|", TEXT, re.MULTILINE)
    expected = {"C": 13, "S": 6, "P": 4}
    assert rows == [f"{kind}{n}" for kind, last in expected.items() for n in range(1, last + 1)]


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_test_that_is_named_exists(path, name):
    source = (ROOT / "tests" / path).read_text(encoding="utf-8")
    assert not name or f"def {name}(" in source
