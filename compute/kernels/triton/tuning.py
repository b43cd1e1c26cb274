"""Which of a kernel's configurations is used: the first one, or the fastest by trial.

Trials are off unless asked for: they take seconds at the first call of a shape, cannot
happen while a CUDA graph is captured, and the winner's order of warps may change a
result's last bits. Which candidates there are, each kernel's module says; the interpreter
always takes the first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from compute.kernels.triton.launch import Launch


def measured(run: Callable[[], None]) -> float:
    """Milliseconds, the median of some runs."""
    from triton.testing import do_bench  # needs a device

    return float(do_bench(run, warmup=5, rep=20, return_mode="median"))


class Tuner:
    """Chosen configurations by kernel and constants; one thread at a time."""

    def __init__(
        self, is_on: bool = False, measure: Callable[[Callable[[], None]], float] = measured
    ) -> None:
        self._is_on = is_on
        self._measure = measure
        self._chosen: dict[Hashable, int] = {}

    def run(
        self,
        key: Hashable,
        num_candidates: Callable[[], int],
        plan: Callable[[int], list[Launch]],
    ) -> None:
        """Run the launches of the choice for `key`. A kernel that is tried runs many times,
        so it must give the same result when it runs again."""
        run_all(plan(self._choice(key, num_candidates, plan)))

    def _choice(
        self,
        key: Hashable,
        num_candidates: Callable[[], int],
        plan: Callable[[int], list[Launch]],
    ) -> int:
        if not self._is_on or (torch.cuda.is_available() and _is_capturing()):
            return self._chosen.get(key, 0)
        if key not in self._chosen:
            plan(0)  # refuses what does not fit, before anything runs
            times = [self._time(plan, choice) for choice in range(num_candidates())]
            self._chosen[key] = times.index(min(times))
        return self._chosen[key]

    def _time(self, plan: Callable[[int], list[Launch]], choice: int) -> float:
        from triton.runtime.errors import OutOfResources

        try:
            return self._measure(lambda: run_all(plan(choice)))
        except OutOfResources:
            return float("inf")


def run_all(launches: list[Launch]) -> None:
    for launch in launches:
        launch.run()


def _is_capturing() -> Any:
    return torch.cuda.is_current_stream_capturing()


FIRST = Tuner()
