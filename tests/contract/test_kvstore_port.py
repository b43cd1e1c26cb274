"""gateway.ports.KvStore: the same behaviour in this process and over gRPC."""

from __future__ import annotations

import dataclasses

import pytest

from gateway.errors import WorkerUnavailable
from gateway.ports import CommitPlan, ExtendPlan, Namespace, OpenPlan, Update
from kvstore import types
from kvstore.manager import PageManager

NS = Namespace(b"m" * 32)


def prompt(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


OPEN_OF_OTHERS = types.OpenPlan("other", list(range(900, 909)), types.Namespace(b"other"))
OPEN_ONE = types.Update(opens=[OPEN_OF_OTHERS])


async def test_a_sequence_lives_from_open_to_close(kv):
    opened = await kv.client.update_sequences(Update(opens=[OpenPlan("a", prompt(12), NS)]))
    (a,) = opened.opened
    assert (a.sequence_id, len(a.block_ids), a.num_cached_tokens) == ("a", 2, 0)
    extended = await kv.client.update_sequences(Update(extends=[ExtendPlan("a", 17)]))
    (more,) = extended.extended
    assert (more.sequence_id, more.first_index, len(more.block_ids)) == ("a", 2, 1)
    assert not set(more.block_ids) & set(a.block_ids)
    commit = CommitPlan("a", 13, 12, [99, 98])
    again = OpenPlan("b", prompt(12), NS)
    result = await kv.client.update_sequences(
        Update(commits=[commit], closes=["a", "unknown"], opens=[again])
    )
    (b,) = result.opened
    assert b.num_cached_tokens == 8
    assert b.block_ids[0] == a.block_ids[0]
    assert result.refused == []
    assert kv.manager.stats().num_sequences == 1


async def test_an_extension_within_the_last_block_reports_nothing(kv):
    await kv.client.update_sequences(Update(opens=[OpenPlan("a", prompt(9), NS)]))
    result = await kv.client.update_sequences(Update(extends=[ExtendPlan("a", 16)]))
    assert (result.extended, result.refused) == ([], [])
    assert kv.manager.stats().num_waste_slots == 0


async def test_refused_entries_name_their_reason_and_leave_the_others(kv):
    await kv.client.update_sequences(Update(opens=[OpenPlan("a", prompt(8), NS)]))
    result = await kv.client.update_sequences(
        Update(
            commits=[CommitPlan("a", 9, 0, []), CommitPlan("a", 8, 0, [])],
            extends=[ExtendPlan("ghost", 4), ExtendPlan("a", 1000), ExtendPlan("a", 9)],
            opens=[
                OpenPlan("a", prompt(9), NS),
                OpenPlan("empty", [], NS),
                OpenPlan("huge", prompt(1000), NS),
                OpenPlan("b", prompt(9), NS),
            ],
        )
    )
    assert [(r.sequence_id, r.reason) for r in result.refused] == [
        ("a", "INVALID_COMMIT"),
        ("ghost", "SEQUENCE_NOT_FOUND"),
        ("a", "OUT_OF_BLOCKS"),
        ("a", "SEQUENCE_EXISTS"),
        ("empty", "INVALID_REQUEST"),
        ("huge", "PROMPT_EXCEEDS_POOL"),
    ]
    assert all(refusal.message for refusal in result.refused)
    assert [e.sequence_id for e in result.extended] == ["a"]
    assert [(o.sequence_id, o.num_cached_tokens) for o in result.opened] == [("b", 8)]


async def test_opens_end_at_the_first_without_room(kv):
    result = await kv.client.update_sequences(
        Update(
            opens=[
                OpenPlan("a", prompt(40), NS),
                OpenPlan("b", prompt(32, 500), NS),
                OpenPlan("c", prompt(8, 900), NS),
            ]
        )
    )
    assert [o.sequence_id for o in result.opened] == ["a"]
    assert [(r.sequence_id, r.reason) for r in result.refused] == [
        ("b", "OUT_OF_BLOCKS"),
        ("c", "OUT_OF_BLOCKS"),
    ]
    assert kv.manager.stats().num_sequences == 1


@pytest.mark.parametrize("part", ["model_fingerprint", "adapter", "tenant", "salt"])
async def test_every_part_of_the_namespace_separates(kv, part):
    await kv.client.update_sequences(Update(opens=[OpenPlan("a", prompt(9), NS)]))
    await kv.client.update_sequences(Update(commits=[CommitPlan("a", 9, 0, [])]))
    value = b"n" * 32 if part == "model_fingerprint" else "x"
    other = NS._replace(**{part: value})
    result = await kv.client.update_sequences(
        Update(opens=[OpenPlan("b", prompt(9), other), OpenPlan("c", prompt(9), NS)])
    )
    assert [o.num_cached_tokens for o in result.opened] == [0, 8]


async def test_closing_the_client_leaves_the_sequences_open(kv):
    await kv.client.update_sequences(Update(opens=[OpenPlan("a", prompt(8), NS)]))
    await kv.client.close()
    assert [s.sequence_id for s in kv.manager.list_sequences()[0]] == ["a"]


async def test_without_a_pool_only_closing_works(kv):
    kv.manager.close()
    with pytest.raises(WorkerUnavailable, match="pool"):
        await kv.client.update_sequences(Update(opens=[OpenPlan("a", prompt(8), NS)]))
    result = await kv.client.update_sequences(Update(closes=["a"]))
    assert (result.opened, result.extended, result.refused) == ([], [], [])


@pytest.mark.parametrize("num_long", [1, 2])
async def test_an_update_beyond_one_message_is_still_one_update(kv, num_long, monkeypatch):
    """Several prompts together exceed 4 MiB; the order of opens holds across the parts."""
    long = [OpenPlan(f"long{i}", [2**31 - 1] * 700_000, NS) for i in range(num_long)]
    small = OpenPlan("small", prompt(8), NS)
    wide = OpenPlan("wide", prompt(65, 100), NS)
    result = await kv.client.update_sequences(Update(opens=[small, *long, wide]))
    assert [o.sequence_id for o in result.opened] == ["small"]
    assert [r.reason for r in result.refused] == ["PROMPT_EXCEEDS_POOL"] * (num_long + 1)


async def test_no_room_in_one_message_stops_the_opens_of_the_next(kv):
    plans = [OpenPlan("a", prompt(40), NS), OpenPlan("b", prompt(40, 500), NS)]
    plans += [OpenPlan(f"long{i}", [2**31 - 1] * 700_000, NS) for i in range(2)]
    plans.append(OpenPlan("c", prompt(8, 900), NS))
    result = await kv.client.update_sequences(Update(opens=plans))
    assert [o.sequence_id for o in result.opened] == ["a"]
    assert [r.reason for r in result.refused] == ["OUT_OF_BLOCKS"] * 4


async def test_statistics_are_those_of_the_page_manager(kv):
    await kv.client.update_sequences(Update(opens=[OpenPlan("a", prompt(12), NS)]))
    await kv.client.update_sequences(Update(commits=[CommitPlan("a", 12, 0, [])], closes=["a"]))
    await kv.client.update_sequences(Update(opens=[OpenPlan("b", prompt(11), NS)]))
    stats = await kv.client.get_stats()
    assert stats == kv.manager.stats()
    assert (stats.num_held, stats.num_waste_slots, stats.num_hit_tokens) == (2, 5, 8)


@pytest.mark.parametrize("kv", ["grpc"], indirect=True)
async def test_a_server_that_is_gone_is_unavailable_until_it_returns(kv):
    await kv.client.update_sequences(Update(opens=[OpenPlan("a", prompt(8), NS)]))
    await kv.server.stop(0)
    with pytest.raises(WorkerUnavailable, match="kvstore"):
        await kv.client.update_sequences(Update(closes=["a"]))
    assert kv.manager.stats().num_sequences == 1


@pytest.mark.parametrize("kv", ["grpc"], indirect=True)
async def test_a_bug_in_the_server_is_unavailable_and_keeps_its_text(kv, monkeypatch):
    def broken(self: PageManager, update: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(PageManager, "update", broken)
    with pytest.raises(WorkerUnavailable) as caught:
        await kv.client.update_sequences(Update(closes=["a"]))
    assert "secret" not in str(caught.value)


def test_the_two_sides_name_the_same_fields():
    """Plans are converted by position; a field added on one side must fail here."""
    from gateway import ports
    from kvstore import types

    for name in (
        "OpenPlan",
        "ExtendPlan",
        "CommitPlan",
        "TruncatePlan",
        "ExtendedSequence",
        "OpenedSequence",
    ):
        ours, theirs = getattr(ports, name), getattr(types, name)
        # The log's, what has another name, and what the gateway has no use for.
        own = {"request_id", "copied_from", "copies", "driver_state", "group", "group_id"}
        own |= {"is_resumption"}
        names = [_fields(side) for side in (ours, theirs)]
        assert [n for n in names[0] if n not in own] == [n for n in names[1] if n not in own]
    assert set(ports.ForkPlan._fields) == set(_fields(types.ForkPlan))
    assert ports.Namespace._fields == types.Namespace._fields


def _fields(kind) -> list[str]:
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return list(kind._fields)


async def test_a_new_driver_closes_what_the_last_one_left_open(kv):
    """As after a crash: nobody else would ever close it."""
    kv.manager.open_sequences([OPEN_OF_OTHERS])
    await kv.client.become_driver("first")
    await kv.client.update_sequences(Update(opens=[OpenPlan("a", prompt(20), NS)]))
    await kv.client.become_driver("second")
    assert [info.sequence_id for info in kv.manager.list_sequences()[0]] == ["other"]
    again = await kv.client.update_sequences(Update(opens=[OpenPlan("a", prompt(20), NS)]))
    assert [opened.sequence_id for opened in again.opened] == ["a"]
    await kv.client.resign()
    assert [info.sequence_id for info in kv.manager.list_sequences()[0]] == ["other"]


async def test_a_driver_that_was_replaced_changes_nothing_more(kv):
    await kv.client.become_driver("first")
    epoch, _ = kv.manager.acquire_driver_lease()
    kv.manager.update(OPEN_ONE, epoch)
    before = kv.manager.stats()
    with pytest.raises(WorkerUnavailable, match="another driver"):
        await kv.client.update_sequences(Update(closes=["other"]))
    with pytest.raises(WorkerUnavailable, match="another driver"):
        await kv.client.update_sequences(Update(opens=[OpenPlan("a", prompt(20), NS)]))
    await kv.client.resign()
    assert kv.manager.stats() == before


async def test_a_prompt_that_begins_like_another_gets_a_copy_of_the_block_they_part_in(kv):
    first = await kv.client.update_sequences(Update(opens=[OpenPlan("a", prompt(17), NS)]))
    await kv.client.update_sequences(Update(commits=[CommitPlan("a", 16, 17, [])]))
    (a,) = first.opened
    result = await kv.client.update_sequences(
        Update(opens=[OpenPlan("b", [*prompt(12), *prompt(8, 500)], NS)])
    )
    (b,) = result.opened
    assert b.num_cached_tokens == 12
    assert list(b.copies) == [(a.block_ids[1], b.block_ids[1])]
    assert result.copies == []
    assert result.transfer > 0
    done = Update(completed_transfer=result.transfer, copy_seconds=0.5)
    await kv.client.update_sequences(done)
    rate = kv.manager._attached.state.costs.device_bytes_per_s
    assert rate == 8 * 2 * 8 * 4 / 0.5  # of a block with 8 tokens
    kv.manager.close_sequences(["a", "b"])


async def test_what_steps_cost_is_told_along_with_an_update(kv):
    before = kv.manager.stats().prefill_tokens_per_s
    await kv.client.update_sequences(
        Update(opens=[OpenPlan("a", prompt(9), NS)], num_prefill_tokens=500, prefill_seconds=0.05)
    )
    assert kv.manager.stats().prefill_tokens_per_s > before
