"""What the page manager's tests know of sequences, blocks and slots.

The model knows what each slot contains, as whoever writes it would, and which prefixes
were ever computed. It does not know how blocks are chosen or evicted.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvstore.attachment import ManagerOptions
from kvstore.errors import OutOfBlocks, QuotaExceeded
from kvstore.eviction import DEFAULT_POLICY
from kvstore.fakes import FakeStorage
from kvstore.manager import PageManager
from kvstore.types import ExtendPlan, ForkedSequence, ForkPlan, KvShape, Namespace, OpenPlan

SHAPE = KvShape(num_layers=1, num_kv_heads=1, head_size=8, dtype="bfloat16")
SPACES = [Namespace(b"m", adapter="x"), Namespace(b"m", tenant="x")]


@dataclass
class Known:
    """A sequence as its driver sees it."""

    space: Namespace
    prompt: list[int]
    tokens: list[int]
    length: int
    num_computed: int
    num_reported: int  # of those: what the manager has been told
    table: list[int] = field(default_factory=list)
    opened: object = None  # None: forked or truncated since
    tail_may_be_found: bool = False  # its last block may have been full, for somebody
    is_suspended: bool = False
    group: str = ""


class ManagerModel:
    """A page manager beside what must be true of it."""

    block_size = 8
    eviction = DEFAULT_POLICY

    def begin(self, num_blocks: int, num_host_blocks: int = 0, limits=None) -> None:
        self.num_blocks = num_blocks
        block_bytes = self.block_size * SHAPE.token_bytes
        self.options = ManagerOptions(
            num_blocks * block_bytes,
            self.block_size,
            num_host_blocks * block_bytes,
            limits or {},
            eviction=self.eviction,
        )
        self.now = 0.0
        self.storage = FakeStorage()
        self.start_manager()
        self.manager.attach_pool(SHAPE)
        self.pins: dict[str, tuple[Namespace, list[int], float]] = {}
        self.transfer = 0
        self.open: dict[str, Known] = {}
        self.slots: dict[tuple[int, int], tuple] = {}  # the prefix whose KV is in a slot
        self.computed: set[tuple] = set()  # every full prefix that was ever committed
        self.next_id = 0
        self.num_crashes = 0

    def start_manager(self) -> None:
        self.manager = PageManager(self.options, self.storage, clock=lambda: self.now)

    @property
    def resident(self) -> list[str]:
        return sorted(key for key, known in self.open.items() if not known.is_suspended)

    @property
    def suspended(self) -> list[str]:
        return sorted(key for key, known in self.open.items() if known.is_suspended)

    def room(self) -> int:
        """Blocks that are not held."""
        return self.num_blocks - self.manager.stats().num_held

    def run(self, copies) -> None:
        """Copy blocks as a driver would, in this order."""
        for source, target in copies:
            for offset in range(self.block_size):
                self.slots.pop((target, offset), None)
                if (source, offset) in self.slots:
                    self.slots[target, offset] = self.slots[source, offset]

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def held(self) -> set[int]:
        """Blocks in tables. Pins and copies that are under way hold others."""
        return {block for known in self.open.values() for block in known.table}

    def prefix(self, space, tokens, num_blocks) -> tuple:
        return (space, tuple(tokens[: num_blocks * self.block_size]))

    def kv_of(self, space, tokens, position) -> tuple:
        return (space, tuple(tokens[: position + 1]))

    def slot(self, table, position) -> tuple[int, int]:
        return (table[position // self.block_size], position % self.block_size)

    def clear(self, blocks) -> None:
        for block in blocks:
            for offset in range(self.block_size):
                self.slots.pop((block, offset), None)

    def best_hit(self, space, prompt) -> int:
        """Blocks of the longest prefix that was ever computed."""
        limit = (len(prompt) - 1) // self.block_size
        return max(
            (n for n in range(1, limit + 1) if self.prefix(space, prompt, n) in self.computed),
            default=0,
        )

    def admit(self, plan: OpenPlan, opened) -> None:
        prompt = list(plan.token_ids)
        num_hits, rest = divmod(opened.num_cached_tokens, self.block_size)
        assert opened.num_cached_tokens < len(prompt)
        assert len(opened.block_ids) == self.blocks_for(len(prompt))
        num_shared = num_hits + (rest > 0) - len(opened.copies)
        assert [target for _, target in opened.copies] == opened.block_ids[num_shared:][
            : len(opened.copies)
        ]
        fresh = opened.block_ids[num_shared:]
        assert not self.held() & set(fresh)
        self.clear(set(fresh) - {target for _, target in opened.copies})
        self.run(opened.copies)
        for position in range(opened.num_cached_tokens):
            expected = self.kv_of(plan.namespace, prompt, position)
            assert self.slots[self.slot(opened.block_ids, position)] == expected
        best = self.best_hit(plan.namespace, prompt)
        assert num_hits <= best
        stats = self.manager.stats()
        if stats.num_evictions + stats.num_demotions + self.num_crashes == 0:
            assert num_hits == best
        self.open[plan.sequence_id] = Known(
            plan.namespace,
            prompt,
            list(prompt),
            len(prompt),
            opened.num_cached_tokens,
            num_shared * self.block_size,
            list(opened.block_ids),
            opened,
            group=plan.group,
        )

    def group_of(self, sequence_id: str) -> list[str]:
        """All of its group that are suspended, or resident, as it is."""
        known = self.open[sequence_id]
        if not known.group:
            return [sequence_id]
        same = (known.group, known.is_suspended)
        return [key for key, one in self.open.items() if (one.group, one.is_suspended) == same]

    def with_groups(self, sequence_ids) -> list[str]:
        return list(dict.fromkeys(key for one in sequence_ids for key in self.group_of(one)))

    def note_fork(self, plan: ForkPlan, forked) -> None:
        source = self.open[plan.source_id]
        num_tokens = plan.length or len(source.tokens)
        length = min(source.length, num_tokens)
        table = source.table[: self.blocks_for(length)]
        computed = min(source.num_reported, length)
        assert forked == ForkedSequence(plan.sequence_id, table, length, computed)
        source.opened, source.tail_may_be_found = None, True
        self.open[plan.sequence_id] = replace(
            source,
            tokens=source.tokens[:num_tokens],
            table=table,
            length=length,
            num_computed=computed,
            num_reported=computed,
        )

    def note_cut(self, sequence_id: str, length: int) -> None:
        known = self.open[sequence_id]
        del known.tokens[length:]
        del known.table[self.blocks_for(length) :]
        known.length = length
        known.num_computed = min(known.num_computed, length)
        known.num_reported = min(known.num_reported, length)
        known.opened = None
        known.tail_may_be_found = True

    def note_leave(self, sequence_id: str) -> None:
        known = self.open[sequence_id]
        known.is_suspended, known.table, known.opened = True, [], None

    def note_return(self, answer) -> None:
        """Its own copies are run, those of the pools were."""
        known = self.open[answer.sequence_id]
        assert answer.length == len(known.tokens)
        assert answer.num_computed_tokens <= max(known.num_reported, len(known.tokens) - 1)
        known.table, known.length = list(answer.block_ids), answer.length
        self.run(answer.copies)
        known.num_computed = answer.num_computed_tokens
        known.is_suspended, known.tail_may_be_found = False, False
        # What is yet to be copied is known to the manager with the next commit.
        listed, _ = self.manager.list_sequences(1000)
        [info] = [one for one in listed if one.sequence_id == answer.sequence_id]
        assert info.num_computed_tokens <= known.num_computed
        known.num_reported = info.num_computed_tokens

    def grow(self, sequence_id: str, length: int, extended) -> None:
        known = self.open[sequence_id]
        assert not self.held() & set(extended.block_ids)
        self.clear(extended.block_ids)
        if extended.copied_from is not None:
            old = known.table.pop()
            assert extended.copied_from == old
            # Until the next commit says that the copy was made.
            known.num_reported = min(known.num_reported, len(known.table) * self.block_size)
            for offset in range(self.block_size):
                if (old, offset) in self.slots:
                    self.slots[extended.block_ids[0], offset] = self.slots[old, offset]
        assert extended.first_index == len(known.table)
        known.table += extended.block_ids
        known.length = max(known.length, length)

    def copies(self, sequence_id: str) -> set[bool]:
        """Whether the next slot may, or must, be in a copy of the last block."""
        known = self.open[sequence_id]
        if known.length % self.block_size == 0:
            return {False}
        others = (other.table for key, other in self.open.items() if key != sequence_id)
        if any(known.table[-1] in table for table in others):
            return {True}
        return {False, True} if known.tail_may_be_found else {False}

    def compute(self, sequence_id: str, count: int) -> None:
        known = self.open[sequence_id]
        for position in range(known.num_computed, count):
            kv = self.kv_of(known.space, known.tokens, position)
            self.slots[self.slot(known.table, position)] = kv
        known.num_computed = max(known.num_computed, count)
        known.num_reported = max(known.num_reported, count)
        for position in range(known.num_reported // self.block_size):
            self.computed.add(self.prefix(known.space, known.tokens, position + 1))

    def snapshot(self):
        return self.manager.stats(), self.manager.list_sequences(1000), self.manager.list_pins()

    def extend_to(self, sequence_id: str, length: int) -> bool:
        """Whether there was room."""
        known = self.open[sequence_id]
        more_blocks = max(0, self.blocks_for(length) - len(known.table))
        copies = self.copies(sequence_id) if length > known.length else {False}
        room = self.room()
        before = self.snapshot()
        try:
            grown = self.manager.extend_sequences([ExtendPlan(sequence_id, length)])
        except (OutOfBlocks, QuotaExceeded):
            assert self.options.tenants or more_blocks + max(copies) > room
            assert self.snapshot() == before
            return False
        is_copied = any(extended.copied_from is not None for extended in grown)
        assert is_copied in copies
        needed = more_blocks + is_copied
        assert needed <= room
        assert [len(extended.block_ids) for extended in grown] == [needed] * bool(needed)
        for extended in grown:
            self.grow(sequence_id, length, extended)
        if length > known.length or grown:
            known.tail_may_be_found = False
        known.length = max(known.length, length)
        return True
