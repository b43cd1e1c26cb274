"""Every invariant of the page manager, checked from scratch and reported in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items

from kvstore.block_pool import BlockPool
from kvstore.sequences import Sequence


def pool_findings(blocks: BlockPool) -> list[str]:
    """What is wrong with the frames, the free list and the tree."""
    frames = blocks.frames
    every = range(frames.num_blocks)
    refs, findable = frames.ref_counts.tolist(), frames.findable.tolist()
    free, cached = frames.free_list(), frames.cached_list()
    held = [b for b in every if refs[b] > 0]
    findings = []
    counters = (frames.num_free, frames.num_cached, frames.num_held)
    lists = (len(free), len(cached), len(held))
    if counters != lists:
        findings.append(f"free, cached, held are counted {counters}, found {lists}")
    if sorted([*free, *cached, *held]) != list(every):
        findings.append("a block is in no state, or in two")
    if any(count < 0 for count in refs):
        findings.append("a reference count is negative")
    if any(findable[b] for b in free):
        findings.append("a free block is findable")
    return findings + _tree_findings(blocks, [b for b in every if findable[b]])


def _tree_findings(blocks: BlockPool, findable: list[int]) -> list[str]:
    nodes = list(blocks.tree.walk())
    findings = []
    if sorted(b for node in nodes for b in node.blocks) != findable:
        findings.append("the tree reaches other blocks than the findable ones")
    for node in nodes:
        parent = node.parent
        if parent is None or parent.end != node.start:
            findings.append("a node of the tree names another parent than the one above it")
        if not (node.is_alive and node.blocks):
            findings.append("a node of the tree is dead")
        if len({blocks.frames.is_held(b) for b in node.blocks}) > 1:
            findings.append("a node of the tree is held in part")
        if any(owner is not node for owner in blocks.tree.owners[list(node.blocks)]):
            findings.append("a block of the tree names another node than its own")
    unheld = {id(node) for node in nodes if not blocks.frames.is_held(node.blocks[0])}
    if {id(node) for node in blocks.queue.nodes()} != unheld:
        findings.append("the nodes to evict are other ones than those without references")
    return findings


def sequence_findings(blocks: BlockPool, sequences: Items[Sequence], block_size: int) -> list[str]:
    """What is wrong with the open sequences and with who refers to which block."""
    references = Counter(b for sequence in sequences for b in sequence.block_ids)
    findings = [
        f"block {block_id} has {count} references, tables list it {references[block_id]} times"
        for block_id, count in enumerate(blocks.frames.ref_counts.tolist())
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
    num_known = len(sequence.tokens) // block_size
    data = sequence.tokens[: num_known * block_size].tobytes()
    found = blocks.tree.find(sequence.chain.namespace, data)
    for position, block_id in enumerate(sequence.block_ids):
        if not blocks.frames.findable[block_id]:
            continue
        if sequence.may_share_tail and position == num_blocks - 1:
            continue  # cut within a block that others may find; it is copied before a write
        if position >= num_full and position >= sequence.num_forked_blocks:
            findings.append(f"block {block_id} is findable before it was computed")
        elif found[position : position + 1] != [block_id]:
            findings.append(f"block {block_id} is findable under another prefix")
    return findings
