"""Pool memory for tests and benchmarks: none."""

from __future__ import annotations


class NoMemory:
    """A pool in name only, in the middle of something else. Knows how often it was released."""

    name, offset_bytes = "quire-none", 4096

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.num_closes = 0

    def close(self) -> None:
        self.num_closes += 1
