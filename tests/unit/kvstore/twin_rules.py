"""Sequences of the same tokens in the model-based test, computed at once or one after the other.

The tree has one block for a prefix, so that the chain of whoever comes later runs through
blocks that it does not hold, and that leave with whoever does.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvstore.errors import PinBudgetExceeded
from kvstore.types import (
    ForkPlan,
    OpenPlan,
    PinPlan,
    SuspendMode,
    TruncatePlan,
)
from tests.unit.kvstore.manager_model import SPACES

NUM_TWINS = 3


class TwinRules:
    """Twins that meet and part, for a machine over ManagerModel."""

    @rule(data=st.data(), num_blocks=st.integers(1, 3), computes=st.booleans())
    def open_twins(self, data, num_blocks, computes):
        """None finds what another is yet to compute."""
        self.next_id += 1
        tokens = [self.next_id % 3] * (num_blocks * self.block_size)
        count = data.draw(st.integers(2, NUM_TWINS), "count")
        if count * num_blocks > self.room() or self.options.tenants:
            return
        space = data.draw(st.sampled_from(SPACES), "space")
        plans = [OpenPlan(f"t{self.next_id}-{n}", tokens, space) for n in range(count)]
        for plan, opened in zip(plans, self.manager.open_sequences(plans), strict=True):
            self.admit(plan, opened)
        for plan in plans if computes else ():
            self.compute_and_commit(plan.sequence_id)

    @precondition(lambda self: self.pairs())
    @rule(data=st.data(), most=st.integers(1, 40))
    def catch_up(self, data, most):
        """One computes what the other has computed."""
        behind, ahead = data.draw(st.sampled_from(self.pairs()), "pair")
        self.go_after(behind, ahead, most)

    @precondition(lambda self: self.pairs())
    @rule(
        data=st.data(),
        leads=st.integers(0, 20),
        leaves=st.sampled_from(["close", "swap", "recompute", "truncate", "stays"]),
        fills=st.booleans(),
    )
    def part(self, data, leads, leaves, fills):
        """One goes ahead and is followed, leaves, and the other goes on as best it can."""
        stays, goes = data.draw(st.sampled_from(self.pairs()), "pair")
        num_known = len(self.open[goes].tokens)
        if leads and self.write(goes, [num_known % 3] * leads):
            self.go_after(stays, goes, leads)
        if data.draw(st.booleans(), "is forked"):
            self.fork_at(data, stays)
        if data.draw(st.booleans(), "is cut first"):
            self.cut_at(data, stays)
        self.leave(data, goes, leaves)
        if fills:
            self.fill_up(self.num_blocks)
        for _ in range(data.draw(st.integers(1, 3), "count")):
            self.go_on(data, stays)

    def leave(self, data, key, how) -> None:
        if how == "close":
            self.manager.close_sequences([key])
            del self.open[key]
        elif how == "truncate":
            self.cut_at(data, key)
        elif how != "stays":
            mode = SuspendMode.SWAP if how == "swap" else SuspendMode.RECOMPUTE
            self.swap_out(key, mode, completes=data.draw(st.booleans(), "completes"))

    def go_on(self, data, key) -> None:
        known = self.open.get(key)
        if known is None or known.is_suspended:  # it was of the group of the one that left
            return
        how = data.draw(st.sampled_from(["write", "cut", "fork", "swap", "pin", "close"]), "how")
        if how == "write":
            count = data.draw(st.integers(1, 3 * self.block_size), "count")
            self.write(key, [data.draw(st.integers(0, 2), "token")] * count)
        elif how == "cut":
            self.cut_at(data, key)
        elif how == "fork":
            self.fork_at(data, key)
        elif how == "swap":
            self.swap_out(key, SuspendMode.SWAP, completes=True)
            self.bring_back([key], True, commits=data.draw(st.booleans(), "commits"))
        elif how == "pin":
            self.pin_sequence(key)
        else:
            self.manager.close_sequences([key])
            del self.open[key]

    # --- steps --------------------------------------------------------------

    def pairs(self) -> list[tuple[str, str]]:
        """Residents of which the second one knows all tokens of the first."""
        keys = self.resident
        return [
            (behind, ahead)
            for behind in keys
            for ahead in keys
            if behind != ahead
            and self.open[behind].space == self.open[ahead].space
            and self.open[behind].tokens == self.open[ahead].tokens[: len(self.open[behind].tokens)]
        ]

    def go_after(self, behind, ahead, most) -> None:
        start = len(self.open[behind].tokens)
        self.write(behind, self.open[ahead].tokens[start : start + most])

    def fork_at(self, data, key) -> None:
        num_known = len(self.open[key].tokens)
        self.next_id += 1
        plan = ForkPlan(key, f"x{self.next_id}", data.draw(st.integers(1, num_known), "length"))
        [forked] = self.manager.fork_sequences([plan])
        self.note_fork(plan, forked)

    def cut_at(self, data, key) -> None:
        """At the end of a block, or anywhere."""
        length = data.draw(st.integers(1, self.open[key].length), "kept length")
        if data.draw(st.booleans(), "whole blocks") and length >= self.block_size:
            length -= length % self.block_size
        self.manager.truncate_sequences([TruncatePlan(key, length)])
        self.note_cut(key, length)

    def pin_sequence(self, key) -> None:
        known = self.open[key]
        full = known.num_reported // self.block_size * self.block_size
        if not full or self.options.tenants:
            return
        pin_id = f"p{len(self.pins)}"
        before = self.snapshot()
        plan = PinPlan(pin_id, "owner", 5.0, sequence_id=key)
        try:
            info = self.manager.pin_prefix(plan)
        except PinBudgetExceeded:
            assert self.snapshot() == before
        else:
            assert info.num_cached_tokens == full, "the sequence has it all"
            self.pins[pin_id] = (known.space, known.tokens[:full], self.now + 5.0)
