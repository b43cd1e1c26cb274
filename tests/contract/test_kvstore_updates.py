"""Updates of all kinds: gateway.ports.KvStore in this process, over gRPC, and the fake one.

Pools have 8 blocks of 8 tokens, and a host pool of the same size.
"""

from __future__ import annotations

import pytest

from gateway.errors import PinRefused
from gateway.ports import (
    CommitPlan,
    ExtendPlan,
    ForkPlan,
    Namespace,
    OpenPlan,
    PinPlan,
    TruncatePlan,
    Update,
)

NS = Namespace(b"m" * 32)


def open_plan(sequence_id, length, first=0, group_id=""):
    return OpenPlan(sequence_id, list(range(first, first + length)), NS, group_id=group_id)


async def opened(store, sequence_id, length, first=0, group_id="", *, computed=True):
    """The table of a new sequence, all of it computed."""
    plan = open_plan(sequence_id, length, first, group_id)
    [one] = (await store.update_sequences(Update(opens=[plan]))).opened
    if computed:
        commit = CommitPlan(sequence_id, length, 0, [])
        await store.update_sequences(Update(commits=[commit]))
    return one.block_ids


def reasons(result):
    return {refusal.sequence_id: refusal.reason for refusal in result.refused}


# --- forks --------------------------------------------------------------------


async def test_a_fork_has_the_blocks_of_its_source(store):
    table = await opened(store, "a", 12)
    result = await store.update_sequences(Update(forks=[ForkPlan("b", "a", 12)]))
    [fork] = result.forked
    assert (fork.sequence_id, fork.block_ids, fork.num_computed_tokens) == ("b", table, 12)
    assert result.num_available_blocks == 6


@pytest.mark.parametrize(
    ("length", "end", "first_index", "num_new", "copies"),
    [(12, 13, 1, 1, True), (12, 25, 1, 3, True), (16, 17, 2, 1, False), (17, 17, 3, 0, False)],
)
async def test_a_fork_with_fewer_tokens_never_writes_where_its_source_reads(
    store, length, end, first_index, num_new, copies
):
    table = await opened(store, "a", 20)
    result = await store.update_sequences(
        Update(
            forks=[ForkPlan("b", "a", length)],
            extends=[ExtendPlan("b", end), ExtendPlan("a", 24)],
        )
    )
    [fork] = result.forked
    assert fork.block_ids == table[: -(-length // 8)]
    assert fork.num_computed_tokens == length
    extended = [one for one in result.extended if one.sequence_id == "b"]
    for one in extended:
        assert (one.first_index, len(one.block_ids)) == (first_index, num_new)
        assert not set(one.block_ids) & set(table)
        replaced = [(table[first_index], one.block_ids[0])] if copies else []
        assert list(one.copies) == replaced
    assert bool(extended) == bool(num_new)
    assert result.refused == []


async def test_the_source_goes_on_in_its_own_block_while_the_fork_copies(store):
    table = await opened(store, "a", 12)
    await store.update_sequences(Update(extends=[ExtendPlan("a", 16)]))
    result = await store.update_sequences(
        Update(forks=[ForkPlan("b", "a", 11)], extends=[ExtendPlan("b", 12)])
    )
    [b] = result.extended
    assert (b.sequence_id, list(b.copies)) == ("b", [(table[1], b.block_ids[0])])
    result = await store.update_sequences(
        Update(commits=[CommitPlan("a", 16, 12, [1, 2, 3, 4])], extends=[ExtendPlan("a", 17)])
    )
    [a] = result.extended
    assert (a.first_index, list(a.copies), result.refused) == (2, [], [])


async def test_the_last_one_who_shares_a_block_writes_to_it(store):
    await opened(store, "a", 12)
    result = await store.update_sequences(
        Update(forks=[ForkPlan("b", "a", 12)], closes=["a"], extends=[ExtendPlan("b", 16)])
    )
    assert (result.extended, result.refused) == ([], [])


async def test_forks_of_one_update_may_follow_from_each_other(store):
    table = await opened(store, "a", 20)
    result = await store.update_sequences(
        Update(forks=[ForkPlan("b", "a", 17), ForkPlan("c", "b", 9), ForkPlan("d", "ghost", 1)])
    )
    assert [fork.block_ids for fork in result.forked] == [table, table[:2]]
    assert reasons(result) == {"d": "SEQUENCE_NOT_FOUND"}


# --- one after the other ------------------------------------------------------


async def test_lists_are_applied_in_the_order_of_the_fields(store):
    """Each needs what the one before it gave: the pool is full."""
    await opened(store, "a", 40)
    await opened(store, "b", 20, 500)
    result = await store.update_sequences(
        Update(
            commits=[CommitPlan("a", 40, 40, [7])],
            forks=[ForkPlan("c", "a", 41)],
            closes=["a"],
            truncates=[TruncatePlan("c", 20)],
            suspends=["b"],
            extends=[ExtendPlan("c", 33)],
            resumes=["b"],
            opens=[open_plan("d", 8, 900), open_plan("e", 8, 901)],
        )
    )
    assert [one.sequence_id for one in result.forked] == ["c"]
    assert [one.sequence_id for one in result.suspended] == ["b"]
    [c] = result.extended
    # Others could find the block that it was cut within.
    assert (c.first_index, len(c.block_ids), len(c.copies)) == (2, 3, 1)
    assert [one.sequence_id for one in result.resumed] == ["b"]
    assert reasons(result) == {"d": "OUT_OF_BLOCKS", "e": "OUT_OF_BLOCKS"}
    assert result.num_available_blocks == 0


async def test_refused_entries_leave_the_others(store):
    await opened(store, "a", 8)
    await opened(store, "s", 8, 500)
    await store.update_sequences(Update(suspends=["s"]))
    result = await store.update_sequences(
        Update(
            commits=[CommitPlan("s", 8, 0, [])],
            forks=[ForkPlan("a", "a", 8), ForkPlan("t", "s", 8), ForkPlan("b", "a", 8)],
            truncates=[TruncatePlan("ghost1", 1), TruncatePlan("b", 5)],
            suspends=["ghost2", "b", "b"],
            extends=[ExtendPlan("ghost3", 9), ExtendPlan("a", 9)],
            resumes=["ghost4", "a", "s", "s"],
        )
    )
    assert [(r.sequence_id, r.reason) for r in result.refused] == [
        ("s", "SEQUENCE_SUSPENDED"),
        ("a", "SEQUENCE_EXISTS"),
        ("t", "SEQUENCE_SUSPENDED"),
        ("ghost1", "SEQUENCE_NOT_FOUND"),
        ("ghost2", "SEQUENCE_NOT_FOUND"),
        ("ghost3", "SEQUENCE_NOT_FOUND"),
        ("ghost4", "SEQUENCE_NOT_FOUND"),
        ("a", "SEQUENCE_NOT_SUSPENDED"),
    ]
    assert [one.sequence_id for one in result.forked] == ["b"]
    assert [one.sequence_id for one in result.suspended] == ["b"]
    assert [one.sequence_id for one in result.extended] == ["a"]
    assert [one.sequence_id for one in result.resumed] == ["s"]


async def test_a_cut_gives_blocks_back_and_may_be_grown_again(store):
    await opened(store, "a", 40, computed=False)
    result = await store.update_sequences(
        Update(truncates=[TruncatePlan("a", 9)], extends=[ExtendPlan("a", 17)])
    )
    [a] = result.extended
    assert (a.first_index, list(a.copies), result.num_available_blocks) == (2, [], 5)


# --- suspended and back -------------------------------------------------------


async def test_a_group_leaves_and_returns_whole(store):
    table = await opened(store, "a", 20, 0, "g")
    await opened(store, "other", 8, 500)
    await store.update_sequences(
        Update(forks=[ForkPlan("b", "a", 20)], extends=[ExtendPlan("b", 21)])
    )
    result = await store.update_sequences(Update(suspends=["b"]))
    assert [one.sequence_id for one in result.suspended] == ["a", "b"]
    assert sum(one.num_freed_blocks for one in result.suspended) == 4
    assert result.num_available_blocks == 7
    sources = {copy.source for copy in result.copies}
    assert sources >= set(table)
    result = await store.update_sequences(Update(completed_transfer=result.transfer, resumes=["a"]))
    assert [one.sequence_id for one in result.resumed] == ["a", "b"]
    assert result.num_available_blocks == 7 - 4


async def test_what_was_swapped_is_there_again_once_its_copies_were_run(store):
    await opened(store, "a", 20)
    away = await store.update_sequences(Update(suspends=["a"]))
    assert [(one.num_freed_blocks, one.is_swapped) for one in away.suspended] == [(3, True)]
    assert len(away.copies) == 3
    assert all(copy.target >= 8 for copy in away.copies)
    await opened(store, "big", 64, 500)
    back = await store.update_sequences(
        Update(completed_transfer=away.transfer, closes=["big"], resumes=["a"])
    )
    [a] = back.resumed
    assert a.num_computed_tokens == 20
    assert [copy.target for copy in a.copies] == a.block_ids
    assert {copy.source for copy in a.copies} == {copy.target for copy in away.copies}
    assert back.transfer > away.transfer


async def test_what_a_group_shared_it_shares_again(store):
    """Else it would not fit where it came from."""
    await opened(store, "a", 40, 0, "g")
    forks = [ForkPlan(name, "a", 40) for name in "bcd"]
    commits = [CommitPlan(name, 40, 40, [number]) for number, name in enumerate("abcd")]
    await store.update_sequences(Update(forks=forks))
    await store.update_sequences(Update(commits=commits))
    away = await store.update_sequences(Update(suspends=["a"]))
    assert sum(one.num_freed_blocks for one in away.suspended) == 5
    await opened(store, "big", 64, 500)
    await store.update_sequences(Update(closes=["big"]))
    refused = await store.update_sequences(Update(resumes=["a"]))
    assert reasons(refused) == {"a": "PROMPT_EXCEEDS_POOL"}, "each has a sixth block of its own"
    back = await store.update_sequences(Update(closes=["d"], resumes=["a"]))
    tables = [one.block_ids for one in back.resumed]
    assert [table[:5] for table in tables] == [tables[0][:5]] * 3
    assert len({table[5] for table in tables}) == 3


@pytest.mark.parametrize("spare", [0, 1])
async def test_resumptions_and_openings_stop_at_the_first_without_room(store, spare):
    await opened(store, "a", 24)
    await opened(store, "b", 24, 500)
    await store.update_sequences(Update(suspends=["a", "b"]))
    await opened(store, "rest", 24 - 8 * spare, 2000)
    result = await store.update_sequences(
        Update(resumes=["a", "b"], opens=[open_plan("c", 8, 900)], num_spare_blocks=3)
    )
    assert [one.sequence_id for one in result.resumed] == (["a"] if spare else [])
    assert reasons(result) == dict.fromkeys("bc" if spare else "abc", "OUT_OF_BLOCKS")
    assert result.num_available_blocks == (3 if spare else 5)


@pytest.mark.parametrize(("num_spare", "fits"), [(3, True), (4, False)])
async def test_an_opening_leaves_what_is_to_be_spared(store, num_spare, fits):
    await opened(store, "a", 16)
    plan = open_plan("b", 24, 500)
    result = await store.update_sequences(Update(opens=[plan], num_spare_blocks=num_spare))
    assert [one.sequence_id for one in result.opened] == ["b"] * fits
    assert reasons(result) == ({} if fits else {"b": "OUT_OF_BLOCKS"})
    assert result.num_available_blocks == (3 if fits else 6)


async def test_what_is_cached_is_available_until_it_is_found_again(store):
    await opened(store, "a", 20)
    result = await store.update_sequences(Update(closes=["a"]))
    assert result.num_available_blocks == 8
    plans = [open_plan("b", 20)]
    result = await store.update_sequences(Update(opens=plans, num_spare_blocks=6))
    assert reasons(result) == {"b": "OUT_OF_BLOCKS"}
    result = await store.update_sequences(Update(opens=plans, num_spare_blocks=5))
    [b] = result.opened
    assert (b.num_cached_tokens, result.num_available_blocks) == (16, 5)


async def test_neighbours_of_a_group_are_opened_together_or_not_at_all(store):
    result = await store.update_sequences(
        Update(
            opens=[
                open_plan("a", 24, 0, "g"),
                open_plan("b", 24, 100, "g"),
                open_plan("c", 8, 200, "h"),
                open_plan("d", 16, 300, "h"),
                open_plan("e", 8, 400),
            ]
        )
    )
    assert [one.sequence_id for one in result.opened] == ["a", "b"]
    assert reasons(result) == dict.fromkeys("cde", "OUT_OF_BLOCKS")
    assert result.num_available_blocks == 2


async def test_a_group_with_a_prompt_that_never_fits_is_refused_and_holds_nobody_back(store):
    plans = [open_plan("a", 8, 0, "g"), open_plan("b", 65, 0, "g"), open_plan("c", 8, 100)]
    result = await store.update_sequences(Update(opens=plans))
    assert reasons(result) == dict.fromkeys("ab", "PROMPT_EXCEEDS_POOL")
    assert [one.sequence_id for one in result.opened] == ["c"]


# --- pins ---------------------------------------------------------------------


async def test_a_pin_keeps_a_prefix_until_it_ends(store):
    await opened(store, "a", 20)
    pin = PinPlan("p", "owner", list(range(20)), NS, 60.0)
    await store.pin_prefix(pin)
    await store.pin_prefix(pin)
    result = await store.update_sequences(Update(closes=["a"]))
    assert result.num_available_blocks == 6
    await opened(store, "big", 48, 500)
    result = await store.update_sequences(Update(opens=[open_plan("late", 8, 900)]))
    assert reasons(result) == {"late": "OUT_OF_BLOCKS"}
    await store.unpin("p")
    await store.unpin("p")
    result = await store.update_sequences(Update(opens=[open_plan("late", 8, 900)]))
    assert [one.sequence_id for one in result.opened] == ["late"]


async def test_a_pin_holds_what_is_computed_later(store):
    await store.pin_prefix(PinPlan("p", "owner", list(range(16)), NS, 60.0))
    await opened(store, "a", 20)
    result = await store.update_sequences(Update(closes=["a"]))
    assert result.num_available_blocks == 6


async def test_pins_have_a_budget(store):
    await store.pin_prefix(PinPlan("p", "owner", list(range(24)), NS, 60.0))
    with pytest.raises(PinRefused):
        await store.pin_prefix(PinPlan("q", "owner", list(range(100, 116)), NS, 60.0))
    await store.unpin("p")
    await store.pin_prefix(PinPlan("q", "owner", list(range(100, 116)), NS, 60.0))


async def test_pins_give_way_to_a_group_that_could_not_come_back_beside_them(store):
    await opened(store, "a", 24)
    await store.pin_prefix(PinPlan("p", "owner", list(range(24)), NS, 60.0))
    await store.update_sequences(Update(closes=["a"]))
    await opened(store, "b", 40, 500)
    await store.update_sequences(Update(commits=[CommitPlan("b", 40, 40, [1])]))
    await store.update_sequences(Update(suspends=["b"]))
    result = await store.update_sequences(Update(resumes=["b"]))
    assert [one.sequence_id for one in result.resumed] == ["b"]
