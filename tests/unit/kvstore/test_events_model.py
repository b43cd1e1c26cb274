"""Snapshot and events, replayed at any time, against what the prefix tree holds."""

from __future__ import annotations

import struct
from hashlib import sha256

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from kvstore.content_keys import split_keys
from kvstore.errors import EventsTooOld
from kvstore.events import BlocksEvicted, BlocksStored
from tests.unit.kvstore.test_content_keys import documented_root
from tests.unit.kvstore.test_manager_model import PageManagerMachine


class Replica:
    """A plain watcher: a dict from key to (parent key, block), and a number."""

    def __init__(self, log) -> None:
        self.log = log
        self.begin()

    def begin(self) -> None:
        self.held: dict | None = None  # None: has no snapshot yet
        self.number = 0
        self.log.start()

    def go_on(self, most: int) -> None:
        try:
            if self.held is not None:
                self.read(most)
            elif not self.log.is_filling:
                self.take(self.log.snapshot())
        except EventsTooOld:
            self.begin()

    def take(self, snapshot) -> None:
        columns = (snapshot.keys.tobytes(), snapshot.parent_keys.tobytes())
        rows = zip(*map(split_keys, columns), snapshot.block_ids.tolist(), strict=True)
        self.held = {key: (parent, block) for key, parent, block in rows}
        self.number = snapshot.number

    def read(self, most: int) -> None:
        for event in self.log.read(self.number, most):
            assert event.number == self.number + 1
            self.number = event.number
            if isinstance(event, BlocksStored):
                parent = event.parent_key
                for key, block in zip(split_keys(event.keys), event.block_ids, strict=True):
                    assert key not in self.held
                    self.held[key] = (parent, block)
                    parent = key
            elif isinstance(event, BlocksEvicted):
                for key in split_keys(event.keys):
                    del self.held[key]


class EventMachine(PageManagerMachine):
    """All that happens to a page manager, and after each of it a little work for watchers.

    At the slower paces, much happens while the tree is walked through, and while events wait.
    """

    @initialize(
        num_blocks=st.integers(1, 14),
        num_host_blocks=st.sampled_from([0, 0, 6]),
        capacity=st.sampled_from([20, 60, 1000]),
        pace=st.sampled_from([1, 10, 1000]),
        restarts=st.booleans(),
    )
    def start(self, num_blocks, num_host_blocks, capacity, pace, restarts):
        super().begin(num_blocks, num_host_blocks)
        self.capacity, self.pace, self.restarts = capacity, pace, restarts
        self.watch()

    @rule()
    def crash(self):
        super().restart(repair=False)
        self.watch()

    def watch(self):
        self.log = self.manager.events()
        self.log.capacity = self.capacity
        self.replicas = [Replica(self.log), Replica(self.log)]
        self.history: dict[int, dict] = {}  # what was findable after which event

    @rule()
    def overflow(self):
        """As if nobody had advanced the log for long."""
        self.log._turn_off()
        for replica in self.replicas:
            replica.begin()

    @rule(most=st.integers(1, 3))
    def follow_slowly(self, most):
        self.follow(self.replicas[1], most)

    @rule()
    def catch_up(self):
        for replica in self.replicas:
            while replica.held is None or replica.number < self.log.number:
                self.log.advance()
                self.follow(replica, 1)
            assert replica.held == self.findable()

    @invariant()
    def follow_at_its_pace(self):
        if hasattr(self, "log"):
            found = self.findable()
            assert self.history.setdefault(self.log.number, found) == found
            self.log.advance(self.pace)
            first = self.replicas[0]
            self.follow(first, self.pace)
            if self.restarts and first.held is not None and first.number == self.log.number:
                self.overflow()  # so that it is walking through the tree most of the time

    def follow(self, replica, most) -> None:
        replica.go_on(most)
        # A call of the manager may make several events; what is findable is known after it.
        if replica.held is not None and replica.number in self.history:
            assert replica.held == self.history[replica.number]

    def findable(self) -> dict:
        """Key by the documented definition -> (key before it, block), from the tree itself."""
        blocks = self.manager._attached.state.blocks
        found = {}
        stack = []
        for namespace, root in blocks.tree._roots.items():
            fingerprint, *rest = namespace
            names = (b"adapter", b"tenant", b"salt")
            parts = zip(names, (part.encode() for part in rest), strict=True)
            key = documented_root([(b"model_fingerprint", fingerprint), *parts])
            stack += [(key, node) for node in root.children.values()]
        while stack:
            key, node = stack.pop()
            tokens = memoryview(bytes(node.data)).cast("i").tolist()
            for at, block in enumerate(node.blocks):
                own = tokens[at * self.block_size : (at + 1) * self.block_size]
                data = struct.pack(f"<{self.block_size}i", *own)
                parent, key = key, sha256(key + data).digest()
                found[key] = (parent, block)
                if node.is_arriving:
                    del found[key]
            stack += [(key, child) for child in node.children.values()]
        assert sorted(block for _, block in found.values()) == [
            block for block, is_findable in enumerate(blocks.frames.findable) if is_findable
        ]
        return found


TestEvents = EventMachine.TestCase
TestEvents.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
