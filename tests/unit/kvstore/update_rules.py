"""Updates with changes of all kinds in the model-based test."""

from __future__ import annotations

from itertools import groupby

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvstore.types import (
    CommitPlan,
    ExtendPlan,
    ForkPlan,
    SuspendMode,
    SuspendPlan,
    TruncatePlan,
    Update,
)

FULL, QUOTA, NEVER = "OUT_OF_BLOCKS", "QUOTA_EXCEEDED", "PROMPT_EXCEEDS_POOL"


class UpdateRules:
    """A driver that does everything at once, for a machine over ManagerModel."""

    @precondition(lambda self: self.open)
    @rule(data=st.data(), runs_copies=st.booleans(), num_spare=st.integers(0, 3))
    def update(self, data, runs_copies, num_spare):
        update = self.draw_update(data, runs_copies, num_spare)
        for plan in update.commits:
            if not self.open[plan.sequence_id].is_suspended:
                self.open[plan.sequence_id].tokens += plan.token_ids
                self.compute(plan.sequence_id, plan.num_computed_tokens)
        self.result = self.manager.update(update)
        self.refused = [(one.sequence_id, one.reason) for one in self.result.refused]
        for plan in update.commits:
            self.is_refused(plan.sequence_id)
        for plan in update.forks:
            self.follow_fork(plan)
        for key in update.closes:
            self.open.pop(key, None)
        for plan in update.truncates:
            if not self.is_refused(plan.sequence_id):
                self.note_cut(plan.sequence_id, plan.length)
        self.follow_suspensions(update.suspends)
        # The order in which a driver runs copies: everything is read before it is written.
        self.run(self.result.copies)
        self.follow_extensions(update.extends)
        self.follow_admissions(update)
        assert not self.refused
        self.transfer = max(self.transfer, self.result.transfer)
        stats = self.manager.stats()
        assert self.result.num_available_blocks == stats.num_free + stats.num_cached
        for answer in self.result.resumed if data.draw(st.booleans(), "commits") else ():
            known = self.open[answer.sequence_id]
            known.num_reported = known.num_computed
            self.manager.commit_blocks([CommitPlan(answer.sequence_id, known.num_computed)])

    def draw_update(self, data, runs_copies, num_spare) -> Update:
        keys = sorted(self.open)
        suspended = [*self.suspended, "ghost"]
        some = st.lists(st.sampled_from([*keys, "ghost"]), unique=True, max_size=2)
        commits = []
        for key in data.draw(st.lists(st.sampled_from(keys), unique=True, max_size=2), "commits"):
            known = self.open[key]
            start = len(known.tokens)
            new = data.draw(st.lists(st.integers(0, 1), max_size=2), "new")
            commits.append(CommitPlan(key, min(known.length, start + len(new)), start, new))
        forks = []
        for source in data.draw(some, "forks"):
            self.next_id += 1
            known = self.open.get(source)
            length = data.draw(st.integers(0, len(known.tokens) if known else 1), "length")
            forks.append(ForkPlan(source, f"u{self.next_id}", length))
        if forks and data.draw(st.booleans(), "fork of a fork"):
            self.next_id += 1
            forks.append(ForkPlan(forks[-1].sequence_id, f"u{self.next_id}", 1))
        grown = st.sampled_from([*keys, "ghost", *(plan.sequence_id for plan in forks)])
        lengths = {key: self.open[key].length for key in keys}
        for plan in forks:
            lengths[plan.sequence_id] = plan.length or lengths.get(plan.source_id, 1)
        extends = [
            ExtendPlan(key, lengths.get(key, 1) + data.draw(st.integers(0, 20), "more"))
            for key in data.draw(st.lists(grown, unique=True, max_size=3), "extends")
        ]
        return Update(
            commits=commits,
            forks=forks,
            closes=data.draw(st.lists(st.sampled_from([*keys, "ghost"]), max_size=1), "closes"),
            truncates=[
                TruncatePlan(key, data.draw(st.integers(1, lengths.get(key, 1)), "length"))
                for key in data.draw(some, "truncates")
            ],
            suspends=[
                SuspendPlan(key, data.draw(st.sampled_from(SuspendMode), "mode"))
                for key in data.draw(some, "suspends")
            ],
            extends=extends,
            resumes=data.draw(
                st.lists(st.sampled_from(suspended), unique=True, max_size=2), "resumes"
            ),
            opens=[self.draw_plan(data) for _ in range(data.draw(st.integers(0, 3), "opens"))],
            num_spare_blocks=num_spare,
            runs_copies=runs_copies,
        )

    def is_refused(self, key) -> bool:
        """Whether an entry for a resident sequence must be refused; takes the refusal."""
        known = self.open.get(key)
        if known is None or known.is_suspended:
            reason = "SEQUENCE_SUSPENDED" if known else "SEQUENCE_NOT_FOUND"
            assert self.refused.pop(0) == (key, reason)
            return True
        return False

    def follow_fork(self, plan) -> None:
        source = self.open.get(plan.source_id)
        if source is None or source.is_suspended:
            reason = "SEQUENCE_SUSPENDED" if source else "SEQUENCE_NOT_FOUND"
            assert self.refused.pop(0) == (plan.sequence_id, reason)
        else:
            self.note_fork(plan, self.result.forked.pop(0))

    def follow_suspensions(self, plans) -> None:
        answers, gone = list(self.result.suspended), set()
        for plan in plans:
            if plan.sequence_id in gone or self.is_refused(plan.sequence_id):
                continue
            for key in self.group_of(plan.sequence_id):
                assert answers.pop(0).sequence_id == key
                gone.add(key)
            for key in gone:
                self.note_leave(key)
        assert not answers

    def follow_extensions(self, plans) -> None:
        answers = list(self.result.extended)
        for plan in plans:
            key = plan.sequence_id
            if self.is_refused(key):
                continue
            if self.refused[:1] in ([(key, FULL)], [(key, QUOTA)]):
                self.refused.pop(0)
                continue
            known = self.open[key]
            if plan.length <= known.length:
                continue
            num_new = self.blocks_for(plan.length) - len(known.table)
            copies = self.copies(key)
            is_next = bool(answers) and answers[0].sequence_id == key
            is_copied = is_next and answers[0].copied_from is not None
            assert is_copied in copies
            assert is_next == (num_new + is_copied > 0)
            if is_next:
                assert len(answers[0].block_ids) == num_new + is_copied
                self.grow(key, plan.length, answers.pop(0))
            known.length, known.tail_may_be_found = plan.length, False
        assert not answers

    def follow_admissions(self, update) -> None:
        num_wanted = None  # by the first that found no room
        resumed, opened = list(self.result.resumed), list(self.result.opened)
        self.check_sharing_of_groups(resumed)
        back = set()
        for key in update.resumes:
            if key in back:
                continue
            known = self.open.get(key)
            if known is None or not known.is_suspended or self.refused[:1] == [(key, FULL)]:
                reason = self.refused.pop(0)[1]
                gone = "SEQUENCE_NOT_SUSPENDED" if known else "SEQUENCE_NOT_FOUND"
                assert reason == FULL or (reason == gone and num_wanted is None)
                if reason == FULL and num_wanted is None:
                    num_wanted = self.num_blocks_back(key)
            elif self.refused[:1] in ([(key, QUOTA)], [(key, NEVER)]):
                self.refused.pop(0)
            else:
                assert num_wanted is None
                for one in self.group_of(key):
                    answer = resumed.pop(0)
                    assert answer.sequence_id == one
                    back.add(one)
                for answer in self.result.resumed:
                    if answer.sequence_id in back and self.open[answer.sequence_id].is_suspended:
                        self.note_return(answer)
        for _, numbered in groupby(
            enumerate(update.opens), key=lambda pair: pair[1].group or pair[0]
        ):
            plans = [plan for _, plan in numbered]
            if self.refused[:1] and self.refused[0][0] == plans[0].sequence_id:
                taken, self.refused = self.refused[: len(plans)], self.refused[len(plans) :]
                [reason] = {reason for _, reason in taken}
                assert [key for key, _ in taken] == [plan.sequence_id for plan in plans]
                assert reason in (FULL, QUOTA, NEVER)
                assert reason == FULL or num_wanted is None
                if reason == FULL and num_wanted is None:
                    num_wanted = sum(self.blocks_for(len(plan.token_ids)) for plan in plans)
                continue
            assert num_wanted is None
            for plan in plans:
                self.admit(plan, opened.pop(0))
        assert not resumed
        assert not opened
        num_spare, room = update.num_spare_blocks, self.room()
        if num_wanted is not None and not self.options.tenants:
            assert num_wanted + num_spare > room
        if (self.result.resumed or self.result.opened) and not self.options.tenants:
            assert room >= num_spare

    def num_blocks_back(self, key) -> int:
        if key not in self.open:
            return self.num_blocks
        return sum(self.blocks_for(len(self.open[one].tokens)) for one in self.group_of(key))

    def check_sharing_of_groups(self, answers) -> None:
        groups = {}
        for answer in answers:
            group = self.open[answer.sequence_id].group or answer.sequence_id
            groups.setdefault(group, []).append(answer)
        for its in groups.values():
            self.check_sharing(its)
