"""What the operations on one pool work on."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.block_pool import BlockPool
from kvstore.errors import ForeignSequence, SequenceNotFound, SequenceSuspended
from kvstore.journal import Journal
from kvstore.pin_book import PinBook
from kvstore.sequences import Sequence
from kvstore.swap_costs import SwapCosts
from kvstore.types import PoolOptions


class PoolState:
    """The blocks of a pool and the open sequences over them.

    Operations change it as a whole or not at all, and write down in the journal what must
    outlive the process.
    """

    def __init__(
        self, blocks: BlockPool, journal: Journal, options: PoolOptions, costs: SwapCosts
    ) -> None:
        self.blocks = blocks
        self.journal = journal
        self.options = options
        self.block_size = blocks.frames.records.block_size
        self.sequences: dict[str, Sequence] = {}  # in the order of opening
        self.pins = PinBook()
        self.costs = costs
        self.epoch = 0  # of the present driver, for the journal
        self.next_serial = 0
        self.num_waste_slots = 0
        self.num_prompt_tokens = 0
        self.num_hit_tokens = 0

    def find(self, sequence_id: str, epoch: int) -> Sequence:
        """An open sequence of this driver's (0: of no driver's).

        Raises:
            SequenceNotFound, ForeignSequence
        """
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            raise SequenceNotFound(sequence_id)
        if sequence.epoch != epoch:
            raise ForeignSequence(sequence_id)
        return sequence

    def find_resident(self, sequence_id: str, epoch: int) -> Sequence:
        """The same; it is not suspended. Raises SequenceSuspended."""
        sequence = self.find(sequence_id, epoch)
        if sequence.is_suspended:
            raise SequenceSuspended(sequence_id)
        return sequence

    def group(self, sequence: Sequence) -> list[Sequence]:
        """All of a sequence's group that are suspended, or resident, as it is."""
        if not sequence.group:
            return [sequence]
        return [
            other
            for other in self.sequences.values()
            if (other.group, other.epoch, other.is_suspended)
            == (sequence.group, sequence.epoch, sequence.is_suspended)
        ]

    def add(self, sequence: Sequence) -> None:
        """The sequence holds its blocks already."""
        self.sequences[sequence.sequence_id] = sequence
        self.next_serial = max(self.next_serial, sequence.serial + 1)
        self.num_waste_slots += self.waste(sequence)

    def publish(self, sequence: Sequence) -> bool:
        """Make the computed full blocks of a resident sequence findable; whether any are new."""
        size = self.block_size
        num_full = sequence.num_computed // size
        self.blocks.refresh(sequence.chain)
        first = sequence.chain.num_blocks
        if num_full <= first:
            return False
        tokens = sequence.tokens[first * size : num_full * size]
        self.blocks.register(sequence.chain, sequence.block_ids[first:num_full], tokens.tobytes())
        return True

    def close(self, sequences: Iterable[Sequence]) -> None:
        """Release what sequences hold and forget them."""
        sequences = list(sequences)
        self.journal.close([sequence.serial for sequence in sequences])
        for sequence in sequences:
            del self.sequences[sequence.sequence_id]
            self.num_waste_slots -= self.waste(sequence)
            self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Drop all references of a sequence; the caller sees to its table."""
        self.release_sources(sequence)
        if sequence.host_ids:
            self.blocks.release_loose(sequence.host_ids, self.blocks.tenant(sequence.chain))
            del sequence.host_ids[:]
        self.blocks.release(sequence.chain, sequence.block_ids)

    def release_sources(self, sequence: Sequence) -> None:
        """What was to be copied for the sequence has been, or is not needed any more."""
        if sequence.sources:
            self.blocks.release_loose(sequence.sources, self.blocks.tenant(sequence.chain))
            del sequence.sources[:]

    def carry_over(self, before: PoolState) -> None:
        """Go on counting where an earlier state of the same pool ended."""
        self.costs = before.costs
        self.num_prompt_tokens, self.num_hit_tokens = (
            before.num_prompt_tokens,
            before.num_hit_tokens,
        )
        self.blocks.carry_over(before.blocks)
        before.blocks.events.close()

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def waste(self, sequence: Sequence) -> int:
        """Slots of its own tail that hold no token."""
        if sequence.is_suspended:
            return 0
        return len(sequence.block_ids) * self.block_size - sequence.length
