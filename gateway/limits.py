"""Bounds of a step and of the queue."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.speculation import SpeculationMethod

_MAX_DRAFTS = 32


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler keeps to. Times in seconds.

    | limit        | default | meaning                                          |
    |--------------|---------|--------------------------------------------------|
    | token_budget | 512     | tokens in a step                                 |
    | max_running  | 64      | sequences that hold blocks; never more than      |
    |              |         | token_budget, so that each can go on every step  |
    | max_waiting  | 256     | requests that wait; more are refused             |
    | step_target  | 0.25    | time of a step that prompts may fill while       |
    |              |         | others decode; 0: the budget alone counts        |
    | ageing       | 10      | waiting time that makes up for a class of        |
    |              |         | priority                                         |
    | watermark    | 0.01    | share of the pool that stays available when a    |
    |              |         | request is admitted beside others                |
    | speculation  | off     | how next tokens are guessed                      |
    | num_drafts   | 4       | guesses for a sequence in a step                 |
    """

    token_budget: int = 512
    max_running: int = 64
    max_waiting: int = 256
    step_target: float = 0.25
    ageing: float = 10.0
    watermark: float = 0.01
    speculation: SpeculationMethod = SpeculationMethod.OFF
    num_drafts: int = 4

    def __post_init__(self) -> None:
        if min(self.token_budget, self.max_running, self.max_waiting) < 1:
            raise ValueError("token_budget, max_running and max_waiting must be at least 1")
        if not (self.step_target >= 0 and self.ageing > 0 and 0 <= self.watermark < 1):
            raise ValueError("step_target, ageing or watermark is out of range")
        if not 1 <= self.num_drafts <= _MAX_DRAFTS:
            raise ValueError(f"num_drafts must be from 1 to {_MAX_DRAFTS}")
