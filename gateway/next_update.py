"""What the kvstore is to be told with the next step."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from gateway.decoding import Fork
from gateway.group import SequenceGroup
from gateway.ports import CommitPlan, ExtendPlan, ForkPlan, TruncatePlan
from gateway.speculation import Speculator


@dataclass(slots=True)
class NextUpdate:
    """What has come up since the last update, and the lengths that the next step needs."""

    commits: list[CommitPlan] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    closes: list[str] = field(default_factory=list)
    suspends: list[str] = field(default_factory=list)
    truncates: list[TruncatePlan] = field(default_factory=list)
    extends: list[ExtendPlan] = field(default_factory=list)

    def plan_lengths(
        self, groups: Items[SequenceGroup], speculator: Speculator, block_size: int
    ) -> bool:
        """Add the room that the sequences need in the step after the one under way, what
        they can give back, and commits of the blocks that they have filled.

        Whether blocks are needed; else the lengths only keep the kvstore's figures fresh.
        """
        # First, so that the copies of a block that is not full are theirs, and the source,
        # which writes to it already, is the one that keeps it.
        self.extends = [ExtendPlan(f.child.id, len(f.child.token_ids)) for f in self.forks]
        needs_blocks = False
        for group in groups:
            for sequence in group.sequences:
                if commit := sequence.take_commit(block_size):
                    self.commits.append(commit)
                if sequence.is_ended or not sequence.block_ids:
                    continue
                length = sequence.length_needed(speculator.num_ahead(sequence))
                if length > sequence.length:
                    self.extends.append(ExtendPlan(sequence.id, length))
                    # Beams are forked: the kvstore must know of each of their tokens.
                    is_needed = length > sequence.num_slots or group.beams is not None
                    needs_blocks = needs_blocks or is_needed
                elif sequence.length - length >= block_size:
                    # Blocks for guesses that were wrong and are not made any more.
                    self.truncates.append(TruncatePlan(sequence.id, length))
                    sequence.cut_room(length, block_size)
        return needs_blocks

    def fork_plans(self) -> list[ForkPlan]:
        return [ForkPlan(fork.child.id, fork.source.id, fork.length) for fork in self.forks]
