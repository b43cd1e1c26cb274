"""Every invariant of the page manager, checked from scratch and reported in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items

from kvstore.block_pool import BlockPool
from kvstore.sequences import Sequence, block_keys
from kvstore.types import BlockId


def pool_findings(blocks: BlockPool) -> list[str]:
    """What is wrong with the frames, the free list and the index."""
    frames = blocks.frames
    every = range(frames.num_blocks)
    free, cached = frames.free_list(), frames.cached_list()
    held = [b for b in every if frames.ref_counts[b] > 0]
    findings = []
    counters = (frames.num_free, frames.num_cached, frames.num_held)
    lists = (len(free), len(cached), len(held))
    if counters != lists:
        findings.append(f"free, cached, held are counted {counters}, found {lists}")
    if sorted([*free, *cached, *held]) != list(every):
        findings.append("a block is in no state, or in two")
    if any(frames.ref_counts[b] < 0 for b in every):
        findings.append("a reference count is negative")
    if any(frames.is_findable(b) for b in free):
        findings.append("a free block is findable")
    if not all(frames.is_findable(b) for b in cached):
        findings.append("a cached block is not findable")
    return findings + _index_findings(blocks, [b for b in every if frames.is_findable(b)])


def _index_findings(blocks: BlockPool, findable: list[BlockId]) -> list[str]:
    edges = blocks.index.walk()
    findings = []
    if sorted(node for node, _, _ in edges) != findable:
        findings.append("the index reaches other blocks than the findable ones")
    if any(blocks.index.parent(node) != parent for node, parent, _ in edges):
        findings.append("a node of the index names another parent than the one above it")
    return findings


def sequence_findings(blocks: BlockPool, sequences: Items[Sequence], block_size: int) -> list[str]:
    """What is wrong with the open sequences and with who refers to which block."""
    references = Counter(b for sequence in sequences for b in sequence.block_ids)
    findings = [
        f"block {block_id} has {count} references, tables list it {references[block_id]} times"
        for block_id, count in enumerate(blocks.frames.ref_counts)
        if references[block_id] != count
    ]
    for sequence in sequences:
        findings += [
            f"{sequence.sequence_id}: {finding}"
            for finding in _one_sequence(blocks, sequence, block_size)
        ]
    return findings


def _one_sequence(blocks: BlockPool, sequence: Sequence, block_size: int) -> list[str]:
    findings = []
    num_blocks = len(sequence.block_ids)
    if not 0 <= num_blocks * block_size - sequence.length < block_size:
        findings.append(f"{num_blocks} blocks for {sequence.length} tokens")
    if len(set(sequence.block_ids)) != num_blocks:
        findings.append("its table lists a block twice")
    if sequence.num_computed > min(sequence.length, len(sequence.tokens)):
        findings.append("more tokens are computed than known or than have a slot")
    # Full blocks that are shared or findable must have been written first.
    num_full = sequence.num_computed // block_size
    keys = block_keys(sequence.tokens, 0, num_full, block_size)
    for position, block_id in enumerate(sequence.block_ids):
        if not blocks.frames.is_findable(block_id):
            continue
        if position >= num_full:
            findings.append(f"block {block_id} is findable before it was computed")
        elif blocks.match(sequence.chain.namespace, keys[: position + 1])[position:] != [block_id]:
            findings.append(f"block {block_id} is findable under another prefix")
    return findings
