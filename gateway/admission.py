"""Which of the groups that wait are opened or resumed, and when.

By key, and none overtakes another that waits for the same: the pool's room, or its
tenant's share of it.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from gateway.group import SequenceGroup, Stage
from gateway.limits import Limits
from gateway.ports import OpenPlan
from gateway.sequence import Sequence
from gateway.wait_queue import WaitQueue


class Entries(NamedTuple):
    """What to ask of the kvstore: sequences to resume, then those to open."""

    resumes: list[str]
    opens: list[OpenPlan]


class Admission:
    """The queue, and what was asked for from it and is not answered yet.

    A group that found no room holds up all others, or those of its tenant, until a
    sequence has ended: what was suspended needs more than is left of what it gave, and
    who came later would only be suspended for it again.
    """

    def __init__(self, limits: Limits, owner: str) -> None:
        self._limits = limits
        self._owner, self._numbers = owner, itertools.count()
        self.queue = WaitQueue()
        self.asked: dict[str, Sequence] = {}  # by id, of groups that open or resume
        self.is_full = False
        self._over_quota: set[str] = set()  # tenants
        self._has_ended = False

    @property
    def num_asked(self) -> int:
        """Sequences for which places are kept, of groups that open or resume."""
        groups = {sequence.group for sequence in self.asked.values()}
        return sum(group.width for group in groups)

    def note_end(self) -> None:
        """A sequence gives its blocks back with the next update."""
        self._has_ended = True

    def note_no_room(self, group: SequenceGroup | None, reason: str) -> None:
        """One was refused, or was suspended."""
        if group is not None and reason == "QUOTA_EXCEEDED":
            self._over_quota.add(group.request.tenant)
        else:
            self.is_full = True

    def reset(self) -> None:
        """There is nothing open any more."""
        self.asked.clear()
        self.is_full = self._has_ended = False
        self._over_quota.clear()

    def plan(
        self, *, num_running: int, max_running: int, backlog: int, fingerprint: bytes
    ) -> Entries:
        """Admit from the head of the queue.

        No more than a step or so of prompts at once, `backlog` of which are there already:
        one that is opened early holds blocks it cannot use yet and misses what those before
        it are computing. What is resumed comes before what is opened in an update, so a
        group to resume behind one to open waits for the next.
        """
        if self._has_ended or not num_running:
            self.is_full = False
            self._over_quota.clear()
        self._has_ended = False
        entries = Entries([], [])
        if self.is_full:
            return entries
        admitted: list[SequenceGroup] = []
        num_places = max_running - num_running - self.num_asked
        for group in self.queue:
            if group.request.tenant in self._over_quota:
                continue
            is_resume = group.is_suspended
            if (
                backlog >= self._limits.token_budget
                or group.width > num_places
                or (is_resume and entries.opens)
            ):
                break
            num_places -= group.width
            backlog += self._admit(group, entries, fingerprint)
            admitted.append(group)
        for group in admitted:
            self.queue.remove(group)
        return entries

    def _admit(self, group: SequenceGroup, entries: Entries, fingerprint: bytes) -> int:
        """Ask for it; how many tokens it may have to compute."""
        if group.is_suspended:
            group.stage = Stage.RESUMING
            entries.resumes.append(group.sequences[0].id)
            self.asked |= {sequence.id: sequence for sequence in group.sequences}
            return sum(len(sequence.token_ids) for sequence in group.sequences)
        group.stage = Stage.OPENING
        namespace = group.namespace(fingerprint)
        for sequence in group.sequences:
            sequence.id = self.new_id(group)
        group.id = group.sequences[0].id
        for sequence in group.sequences:
            self.asked[sequence.id] = sequence
            entries.opens.append(
                OpenPlan(
                    sequence.id,
                    tuple(sequence.token_ids),
                    namespace,
                    group.log_id,
                    group.was_opened,
                    # One that will never be more than one needs no name for all.
                    group.id if group.width > 1 else "",
                )
            )
        return sum(len(sequence.token_ids) for sequence in group.sequences)

    def new_id(self, group: SequenceGroup) -> str:
        """Unique among all drivers that a kvstore has seen."""
        return f"{group.request.request_id}.{self._owner}.{next(self._numbers)}"

    def wait_again(self, group: SequenceGroup) -> None:
        """Back to its place in the queue."""
        group.stage = Stage.SUSPENDED if group.is_suspended else Stage.WAITING
        self.queue.add(group)
