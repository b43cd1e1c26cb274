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
class PreemptionStats:
    """Totals since the start: groups that were suspended, and what became of their sequences."""

    num_groups: int = 0
    num_swapped: int = 0
    num_recomputed: int = 0
    num_resumed: int = 0


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Totals since the start."""

    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine at one instant.

    num_running counts sequences, the places kept for those that a request will fork too;
    num_waiting requests. num_table_blocks counts the blocks in running sequences'
    tables, a shared one once for each.
    """

    is_ready: bool
    num_running: int
    num_waiting: int
    num_table_blocks: int
    preemptions: PreemptionStats
    speculation: SpeculationStats
    counters: Counters
