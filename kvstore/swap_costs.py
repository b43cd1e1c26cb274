"""What it costs to copy KV and to compute it again, as measured."""

from __future__ import annotations

from kvstore.types import SwapStats

# How much of a rate the latest measurement is.
_WEIGHT = 0.2
_MOST_FACTOR = 4.0
_MOST_PER_SECOND = 1e14  # no memory and no processor is that fast


class SwapCosts:
    """Rates that whoever runs copies and prefills reports, and what follows from them.

    Until something was measured, rates are nominal: those of a small machine. The first
    measurement takes their place, later ones change what there is by a fifth.
    """

    def __init__(self, token_bytes: int, block_size: int) -> None:
        self._token_bytes, self._block_size = token_bytes, block_size
        self.prefill_tokens_per_s = 2000.0
        self.host_bytes_per_s = 4e9  # between the page pool and the host pool
        self.device_bytes_per_s = 8e9  # within the page pool
        self.stats = SwapStats()
        self._measured: set[str] = set()

    @property
    def block_bytes(self) -> int:
        return self._token_bytes * self._block_size

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """So many prompt tokens were computed in this time."""
        if num_tokens > 0 and seconds > 0:
            rate = num_tokens / seconds
            self.prefill_tokens_per_s = self._blend("prefill", self.prefill_tokens_per_s, rate)

    def observe_copies(
        self, num_host: int, num_inside: int, num_swaps: int, seconds: float
    ) -> None:
        """So many blocks were copied in this time.

        To or from the host pool, some of them for suspensions, and within the page pool.
        """
        num_blocks = num_host + num_inside
        if num_blocks <= 0 or seconds <= 0:
            return
        rate = num_blocks * self.block_bytes / seconds
        if num_host:
            self.host_bytes_per_s = self._blend("host", self.host_bytes_per_s, rate)
        else:
            self.device_bytes_per_s = self._blend("device", self.device_bytes_per_s, rate)
        self.stats.swap_actual_seconds += seconds * num_swaps / num_blocks

    def swap_seconds(self, num_blocks: int) -> float:
        """To copy blocks to the host pool and back."""
        return 2 * num_blocks * self.block_bytes / self.host_bytes_per_s

    def recompute_seconds(self, num_tokens: int) -> float:
        return num_tokens / self.prefill_tokens_per_s

    def copy_pays(self, num_tokens: int) -> bool:
        """Copying a block of the page pool costs less than computing its first tokens."""
        copy_seconds = self.block_bytes / self.device_bytes_per_s
        return num_tokens > 0 and copy_seconds < self.recompute_seconds(num_tokens)

    def _blend(self, name: str, old: float, new: float) -> float:
        new = min(max(new, 1.0), _MOST_PER_SECOND)
        if name not in self._measured:
            self._measured.add(name)
            return new
        # One that is far out is a clock that went wrong, or something that was in the way.
        new = min(max(new, old / _MOST_FACTOR), old * _MOST_FACTOR)
        return old + _WEIGHT * (new - old)
