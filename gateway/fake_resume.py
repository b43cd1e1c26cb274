"""How the fake page manager brings suspended sequences back."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.fake_blocks import FakeBlocks, FakeSequence, Key
from gateway.ports import BlockCopy, ResumedSequence


def resume_group(
    blocks: FakeBlocks, group: Sequence[FakeSequence], num_spare: int, completed: int
) -> list[ResumedSequence]:
    """Bring back a whole group, with what arrived in the host pool: transfers up to
    `completed`.

    Full blocks that members have in common are shared again, computed or not. Raises NoRoom,
    changing nothing.
    """
    hits, places = [], []
    for entry in group:
        found = blocks.find(entry.namespace, entry.token_ids[: entry.num_findable])
        last = blocks.num_for(len(entry.token_ids))
        hits.append(found)
        places.append([_place(blocks, entry, index) for index in range(len(found), last)])
    distinct = dict.fromkeys(place for its in places for place in its)
    blocks.check_room(len(distinct), hits, num_spare)
    for found in hits:
        blocks.hold(found)
    taken = {place: blocks.take() for place in distinct}
    present: dict[int, int] = {}  # tokens that copies bring, by block
    resumed = []
    for entry, found, its in zip(group, hits, places, strict=True):
        new = [taken[place] for place in its]
        blocks.hold(block_id for block_id in new if block_id in present)
        kept = entry.host_ids if entry.transfer <= completed else []
        resumed.append(_bring_back(entry, found, new, kept, blocks.block_size, present))
    return resumed


def num_blocks_of(blocks: FakeBlocks, group: Sequence[FakeSequence]) -> int:
    """Blocks that a group has when it is back."""
    return len(
        {
            _place(blocks, entry, index)
            for entry in group
            for index in range(blocks.num_for(len(entry.token_ids)))
        }
    )


def _place(blocks: FakeBlocks, entry: FakeSequence, index: int) -> Key | tuple[str, int]:
    """What tells a block from others; the same for those that can be shared."""
    if (index + 1) * blocks.block_size <= entry.num_findable:
        return blocks.key(entry.namespace, entry.token_ids, index)
    return entry.sequence_id, index


def _bring_back(
    entry: FakeSequence,
    found: list[int],
    new: list[int],
    kept: list[int],
    size: int,
    present: dict[int, int],
) -> ResumedSequence:
    """`kept`: blocks of the host pool with the KV of its first blocks."""
    first = len(found)
    num_present = max(first * size, entry.num_computed) if kept else first * size
    copies = []
    for index, block_id in enumerate(new, first):
        num_tokens = min(size, max(0, num_present - index * size))
        if num_tokens > present.setdefault(block_id, 0):
            present[block_id] = num_tokens
            copies.append(BlockCopy(kept[index], block_id))
    entry.block_ids, entry.length = found + new, len(entry.token_ids)
    entry.num_computed, entry.is_suspended = first * size, False
    return ResumedSequence(entry.sequence_id, list(entry.block_ids), num_present, copies)
