"""Text of others on our terminal."""

from __future__ import annotations

import unicodedata


def printable(text: str) -> str:
    """`text` without what could steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def one_line(text: str) -> str:
    """The same, in one line."""
    return " ".join(printable(text).split())
