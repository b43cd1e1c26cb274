"""What it costs to copy KV and to compute it again, as measured."""

from __future__ import annotations

from kvstore.types import SwapStats

# How much of a rate the latest measurement is.
_WEIGHT = 0.2


class SwapCosts:
    """Rates that whoever runs copies and prefills reports, and what follows from them.

    Until something was measured, rates are nominal: those of a small machine.
    """

    def __init__(self, token_bytes: int, block_size: int) -> None:
        self._token_bytes, self._block_size = token_bytes, block_size
        self.prefill_tokens_per_s = 2000.0
        self.host_bytes_per_s = 4e9  # between the page pool and the host pool
        self.device_bytes_per_s = 8e9  # within the page pool
        self.stats = SwapStats()

    @property
    def block_bytes(self) -> int:
        return self._token_bytes * self._block_size

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """So many prompt tokens were computed in this time."""
        if num_tokens > 0 and seconds > 0:
            self.prefill_tokens_per_s = _blend(self.prefill_tokens_per_s, num_tokens / seconds)

    def observe_host_copies(self, num_blocks: int, num_swaps: int, seconds: float) -> None:
        """So many blocks were copied to or from the host pool, some for suspensions."""
        if num_blocks > 0 and seconds > 0:
            rate = num_blocks * self.block_bytes / seconds
            self.host_bytes_per_s = _blend(self.host_bytes_per_s, rate)
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


def _blend(old: float, new: float) -> float:
    return old + _WEIGHT * (new - old)
