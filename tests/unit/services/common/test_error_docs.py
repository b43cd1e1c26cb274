"""docs/errors.md and the table of errors say the same."""

from __future__ import annotations

import re
from pathlib import Path

from services.common.errors import TABLE

PAGE = Path(__file__).parents[4] / "docs" / "errors.md"


def documented() -> dict[str, tuple[str, str | None]]:
    """The gRPC code of each reason in the page, and the HTTP status if there is one."""
    found = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or not re.fullmatch(r"[A-Z_]+(, [A-Z_]+)*", cells[0]):
            continue
        http = cells[2] if re.fullmatch(r"\d{3}", cells[2]) else None
        for reason in cells[0].split(", "):
            assert reason not in found, f"{reason} is there twice"
            found[reason] = (cells[1], http)
    return found


def test_every_reason_is_documented_and_no_other():
    assert documented().keys() == TABLE.keys()


def test_codes_and_statuses_are_those_of_the_table():
    for reason, (code, http) in documented().items():
        assert code == TABLE[reason][0].name, reason
        assert http in (None, str(TABLE[reason][1])), reason
