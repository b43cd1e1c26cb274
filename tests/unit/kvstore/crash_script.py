"""Calls to a page manager that come past every kill point."""

from __future__ import annotations

from kvstore.attachment import ManagerOptions
from kvstore.errors import SequenceExists, SequenceNotSuspended, SequenceSuspended
from kvstore.fakes import FakeStorage
from kvstore.manager import PageManager
from kvstore.types import (
    CommitPlan,
    ExtendPlan,
    ForkPlan,
    Namespace,
    OpenPlan,
    PinPlan,
    SuspendMode,
    SuspendPlan,
    TruncatePlan,
    Update,
)
from tests.unit.kvstore.conftest import SHAPE
from tests.unit.kvstore.crashing import Fuse

SIZE = 8
OPTIONS = ManagerOptions(8 * SIZE * SHAPE.token_bytes, SIZE, 6 * SIZE * SHAPE.token_bytes)
OURS, THEIRS = Namespace(b"m", tenant="ours"), Namespace(b"m", tenant="theirs")


class Script:
    """Calls that reach every kill point, by a driver and by another client.

    A call that is repeated is done, or is refused because it was done.
    """

    def __init__(self) -> None:
        self.fuse = Fuse()
        self.storage = FakeStorage()
        self.epoch = 0
        self.transfer = 0
        self.start()

    def start(self) -> None:
        self.manager = PageManager(OPTIONS, self.storage, reached=self.fuse, clock=lambda: 0.0)

    def steps(self):
        m = self.manager
        return [
            lambda: m.attach_pool(SHAPE),
            self.take_the_lease,
            lambda: m.open_sequences([OpenPlan("client's", range(20), THEIRS)]),
            lambda: m.commit_blocks([CommitPlan("client's", 20)]),
            lambda: m.open_sequences(
                [OpenPlan("a", range(100, 112), OURS, b"state", "group")], self.epoch
            ),
            lambda: m.commit_blocks([CommitPlan("a", 12, 12, [7], b"next")], self.epoch),
            lambda: m.fork_sequences([ForkPlan("a", "b")], self.epoch),
            lambda: m.extend_sequences([ExtendPlan("a", 13), ExtendPlan("b", 17)], self.epoch),
            lambda: m.commit_blocks(
                [CommitPlan("a", 13), CommitPlan("b", 17, 12, [7, 8, 9, 8, 9])], self.epoch
            ),
            lambda: m.truncate_sequences([TruncatePlan("b", 10)], self.epoch),
            lambda: m.pin_prefix(PinPlan("driver's", "o", 60, OURS, range(100, 112)), self.epoch),
            lambda: m.pin_prefix(PinPlan("client's", "o", 60, THEIRS, range(16))),
            self.suspend,
            lambda: m.complete_transfer(self.transfer, 0.0, self.epoch),
            lambda: m.close_sequences(["client's"]),
            lambda: m.unpin(pin_id="client's"),
            self.fill,
            lambda: m.commit_blocks([CommitPlan("large", 40)]),
            lambda: m.close_sequences(["large"]),
            lambda: m.resume_sequences(["a"], self.epoch, runs_copies=True),
            self.adopt_the_lease,
            lambda: m.update(
                Update(
                    commits=[CommitPlan("a", 13)],
                    closes=["b"],
                    opens=[OpenPlan("late", range(100, 110), OURS)],
                ),
                self.epoch,
            ),
            lambda: m.extend_sequences([ExtendPlan("a", 20)], self.epoch),
            lambda: m.close_sequences(["a"], self.epoch),
            self.take_the_lease,
            lambda: m.open_sequences([OpenPlan("last", range(9), OURS)], self.epoch),
            lambda: m.pin_prefix(PinPlan("last", "o", 60, OURS, range(8)), self.epoch),
            lambda: m.release_driver_lease(self.epoch),
        ]

    def take_the_lease(self) -> None:
        self.epoch, _ = self.manager.acquire_driver_lease()

    def adopt_the_lease(self) -> None:
        self.epoch, _ = self.manager.acquire_driver_lease(adopt=True)

    def suspend(self) -> None:
        plan = SuspendPlan("b", SuspendMode.SWAP)
        answer = self.manager.suspend_sequences([plan], self.epoch, runs_copies=True)
        self.transfer = answer[2]

    def fill(self) -> None:
        plan = OpenPlan("large", range(1000, 1040), THEIRS)
        self.manager.update(Update(opens=[plan], runs_copies=True))

    def run(self, number: int) -> None:
        self.steps()[number]()

    def run_again(self, number: int) -> None:
        try:
            self.run(number)
        except (SequenceExists, SequenceSuspended, SequenceNotSuspended):
            assert number in REFUSES_A_REPEAT

    def seen(self):
        """Sequences by id, and pins."""
        listed, _ = self.manager.list_sequences(1000, with_tokens=True)
        return {one.sequence_id: one for one in listed}, self.manager.list_pins()


NUM_STEPS = len(Script().steps())
REFUSES_A_REPEAT = {6, 12, 19}  # a fork, a suspension, a resumption
