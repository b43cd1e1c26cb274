"""What the engine counts. `services` exports it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    num_steps: int = 0
    num_step_tokens: int = 0  # tokens that steps computed, prompts included
    num_updates: int = 0
    num_reconnects: int = 0
    step_seconds: float = 0.0  # in compute


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine at one instant.

    num_table_blocks counts the blocks in running sequences' tables, a shared one
    once for each.
    """

    is_ready: bool
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_table_blocks: int
    counters: Counters
