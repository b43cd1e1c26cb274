from __future__ import annotations

import pytest

from gateway.errors import QueueFull, WorkerUnavailable
from gateway.limits import Limits
from gateway.ports import Refusal, UpdateResult
from gateway.types import FinishReason, GenerationRequest


def test_a_prompt_is_computed_in_chunks_within_the_budget(new_cell):
    cell = new_cell(token_budget=4)
    sequence = cell.add(range(10), max_tokens=2)
    cell.run()
    chunks = [(c.start, c.num_tokens, c.sample) for step in cell.steps for c in step.chunks]
    assert chunks == [(0, 4, False), (4, 4, False), (8, 2, True), (10, 1, True)]
    assert cell.outputs["r0"] == cell.expected(sequence)


def test_decodes_go_before_prefills(new_cell):
    cell = new_cell(token_budget=8)
    cell.add(range(3), max_tokens=20)
    while not cell.outputs["r0"]:
        cell.turn()
    cell.add(range(30, 50))
    seen = len(cell.steps)
    while not cell.outputs["r1"]:
        cell.turn()
    mixed = [s for s in cell.steps[seen:] if len(s.chunks) == 2]
    assert [[c.num_tokens for c in step.chunks] for step in mixed] == [[1, 7], [1, 7], [1, 6]]


def test_requests_are_admitted_in_the_order_of_arrival(new_cell):
    cell = new_cell(max_running=2)
    for index in range(6):
        cell.add([index] * (6 - index))
    cell.run()
    assert cell.first_opens == [f"r{index}" for index in range(6)]


def test_no_more_than_max_running_hold_blocks(new_cell):
    cell = new_cell(max_running=2)
    for index in range(5):
        cell.add([index] * 4)
    while cell.turn():
        assert len(cell.kv.sequences) <= 2
    assert len(cell.finishes) == 5


def test_a_small_budget_limits_how_many_run(new_cell):
    cell = new_cell(token_budget=2, max_running=64)
    for index in range(4):
        cell.add([index] * 3)
    while cell.turn():
        assert len(cell.kv.sequences) <= 2
    assert len(cell.finishes) == 4


def test_a_full_queue_refuses_and_keeps_what_waits(new_cell):
    cell = new_cell(max_waiting=2)
    cell.add([1])
    cell.add([2])
    with pytest.raises(QueueFull):
        cell.scheduler.add(GenerationRequest("x", [3]), 9)
    assert cell.scheduler.num_waiting == 2
    cell.run()
    assert set(cell.finishes) == {"r0", "r1"}


def test_limits_below_one_are_refused():
    with pytest.raises(ValueError, match="token_budget"):
        Limits(token_budget=0)


def test_equal_prompts_share_what_the_first_has_computed(new_cell):
    cell = new_cell(token_budget=16)
    prompt = list(range(16))
    cell.add(prompt)
    cell.run()
    cell.add(prompt)
    cell.run()
    assert cell.steps[-8].chunks[0].start == 12  # three of four blocks; one token must be left
    assert cell.outputs["r1"] == cell.outputs["r0"]


def test_a_prompt_is_not_opened_before_its_turn_and_so_finds_what_others_computed(new_cell):
    cell = new_cell(token_budget=8)
    prompt = list(range(24))
    for _ in range(2):
        cell.add(prompt, max_tokens=1)
    cell.run()
    assert sum(c.num_tokens for step in cell.steps for c in step.chunks) < 48
    assert cell.outputs["r1"] == cell.outputs["r0"]


def test_a_prompt_that_is_cached_but_for_one_token_goes_with_the_decodes(new_cell):
    cell = new_cell(token_budget=8)
    cell.add(range(17), max_tokens=1)
    cell.run()
    cell.add(range(50, 65), max_tokens=1)
    cell.add(range(17), max_tokens=1)
    cell.run()
    last = cell.steps[-1].chunks
    assert [(chunk.start, chunk.num_tokens) for chunk in last] == [(16, 1), (8, 7)]


def test_tenants_share_nothing(new_cell):
    cell = new_cell()
    cell.add(range(16), tenant="a")
    cell.run()
    cell.add(range(16), tenant="b")
    seen = len(cell.steps)
    cell.run()
    assert cell.steps[seen].chunks[0].start == 0


def test_a_request_cancelled_before_its_prefill_publishes_nothing(new_cell):
    cell = new_cell()
    sequence = cell.add(range(16))
    cell.turn()  # opened, nothing computed
    assert len(cell.kv.sequences) == 1
    cell.scheduler.end(sequence)
    cell.run()
    cell.assert_empty()
    cell.add(range(16))
    cell.run()
    assert cell.steps[0].chunks[0].start == 0


@pytest.mark.parametrize("num_turns", [0, 1, 2, 3, 7])
def test_a_cancelled_request_frees_its_blocks_within_two_turns(new_cell, num_turns):
    cell = new_cell(token_budget=4)
    other = cell.add(range(50, 55), max_tokens=30)
    sequence = cell.add(range(10), max_tokens=50)
    for _ in range(num_turns):
        cell.turn()
    cell.scheduler.end(sequence)
    cell.turn()
    cell.turn()
    assert len(cell.kv.sequences) == 1
    cell.run()
    assert cell.outputs["r0"] == cell.expected(other)
    cell.assert_empty()


def test_an_end_in_the_middle_of_a_step_waits_for_the_step(new_cell):
    cell = new_cell()
    sequence = cell.add(range(10))
    cell.turn()
    step = cell.scheduler.plan_step()
    sequence_id = sequence.sequences[0].id
    cell.scheduler.end(sequence)
    assert not cell.scheduler.plan_update()
    assert cell.scheduler.apply_result(cell.stream.run(step, cell.stream.granted())) == []
    assert cell.scheduler.plan_update().closes == [sequence_id]


def test_the_end_of_text_token_ends_a_sequence_unless_ignored(new_cell):
    first = new_cell()
    first.add([1, 2, 3], max_tokens=6)
    first.run()
    eos_id = first.outputs["r0"][3]
    cell = new_cell(eos_ids=[eos_id])
    cell.add([1, 2, 3], max_tokens=6)
    cell.run()
    assert cell.outputs["r0"] == first.outputs["r0"][:4]
    assert cell.finishes["r0"] is FinishReason.STOP
    assert first.finishes["r0"] is FinishReason.LENGTH


def test_nothing_is_sent_to_the_kvstore_within_a_block(new_cell):
    cell = new_cell(block_size=16)
    cell.add([1], max_tokens=40)
    cell.run()
    # Open; room for 17 and 33; two full blocks; close. Each once.
    assert len(cell.updates) == 6
    assert len(cell.steps) == 40


def test_a_shortage_preempts_one_sequence_and_all_finish_as_undisturbed(new_cell):
    cell = new_cell(num_blocks=16, block_size=4)
    sequences = [cell.add([index] * 8, max_tokens=4) for index in range(8)]
    cell.run()
    # All eight need a third block at once, and none is free: the first victim's two
    # serve two of them, and so on.
    assert 1 <= cell.scheduler.preemption_stats().num_groups < 8
    for index, sequence in enumerate(sequences):
        assert cell.outputs[f"r{index}"] == cell.expected(sequence)
    cell.assert_empty()


def test_one_missing_block_costs_one_victim_the_latest(new_cell):
    cell = new_cell(num_blocks=16, block_size=4)
    for index in range(7):
        cell.add([index] * 5, max_tokens=3)
    cell.add([99] * 7, max_tokens=20)
    cell.add([98], max_tokens=2)
    victim = cell.groups[7]
    cell.run()
    assert cell.scheduler.preemption_stats().num_groups == 1
    assert [len(update.resumes) for update in cell.updates if update.resumes] == [1]
    assert all(len(cell.outputs[f"r{index}"]) == 3 for index in range(7))
    assert cell.outputs["r7"] == cell.expected(victim)


def test_what_has_just_ended_spares_a_victim(new_cell):
    cell = new_cell(num_blocks=4, block_size=4)
    cell.add([1] * 7, max_tokens=2)
    other = cell.add([2] * 7, max_tokens=6)
    cell.run()
    # r0 gives two blocks back in the very turn in which r1 finds no third one.
    assert cell.scheduler.preemption_stats().num_groups == 0
    assert cell.outputs["r1"] == cell.expected(other)


def test_a_sequence_that_alone_finds_no_room_fails_instead_of_waiting_for_ever(new_cell):
    cell = new_cell(num_blocks=4, block_size=4)
    other = new_cell(num_blocks=4, block_size=4)
    sequence = cell.add([1] * 7, max_tokens=9)
    cell.turn()
    cell.kv._free.clear()  # another client of the kvstore took the rest
    cell.run()
    assert [(failed, type(error)) for failed, error in cell.failures] == [
        (sequence, WorkerUnavailable)
    ]
    assert not cell.kv.sequences
    other.add([1] * 7, max_tokens=9)
    other.run()
    assert not other.failures


def test_a_head_that_finds_no_room_is_not_overtaken_nor_asked_again_every_step(new_cell):
    cell = new_cell(num_blocks=8, block_size=4)
    cell.add([1] * 8, max_tokens=16)
    cell.turn()
    cell.add([2] * 28, max_tokens=4)
    cell.add([3], max_tokens=1)
    cell.run()
    assert cell.first_opens == ["r0", "r1", "r2"]
    asked = [plan for update in cell.updates for plan in update.opens if len(plan.token_ids) == 28]
    assert len(asked) == 2
    assert set(cell.finishes) == {"r0", "r1", "r2"}


def test_a_prompt_that_the_kvstore_can_never_hold_fails_alone(new_cell):
    cell = new_cell(num_blocks=4, block_size=4)
    sequence = cell.add(range(20))
    cell.add([1])
    cell.run()
    assert [(failed, error.reason) for failed, error in cell.failures] == [
        (sequence, "PROMPT_EXCEEDS_POOL")
    ]
    assert set(cell.finishes) == {"r1"}


def opened_and_stepping(new_cell):
    cell = new_cell(block_size=4)
    running, waiting = cell.add(range(3), max_tokens=30), None
    cell.turn()
    cell.turn()
    waiting = cell.add([7])
    cell.scheduler.plan_step()
    update = cell.scheduler.plan_update()
    assert update.opens
    return cell, running, waiting


def test_any_other_refusal_means_the_kvstore_has_lost_our_sequences(new_cell):
    cell, running, waiting = opened_and_stepping(new_cell)
    full = Refusal(waiting.sequences[0].id, "OUT_OF_BLOCKS", "")
    gone = Refusal(running.sequences[0].id, "SEQUENCE_NOT_FOUND", "")
    with pytest.raises(WorkerUnavailable):
        cell.scheduler.apply_update(UpdateResult([], [], [full, gone]))
    assert cell.scheduler.abandon() == []
    assert cell.scheduler.num_waiting == 2


def test_what_the_workers_cannot_bear_ends_and_what_was_being_opened_waits(new_cell):
    cell, running, waiting = opened_and_stepping(new_cell)
    assert cell.scheduler.abandon(is_theirs=True) == [running]
    assert (cell.scheduler.num_running, cell.scheduler.num_waiting) == (0, 1)
    cell.kv.restart()
    cell.run()
    assert cell.outputs["r1"] == cell.expected(waiting)
    assert cell.outputs["r0"] == cell.expected(running)[: len(cell.outputs["r0"])]


def test_after_a_loss_all_go_on_in_the_order_of_arrival(new_cell):
    cell, running, waiting = opened_and_stepping(new_cell)
    drawn = list(cell.outputs["r0"])
    assert drawn
    assert cell.scheduler.abandon() == []
    cell.kv.restart()
    cell.run()
    for name, sequence in (("r0", running), ("r1", waiting)):
        assert cell.outputs[name] == cell.expected(sequence)


def test_a_request_with_which_workers_die_again_and_again_is_given_up(new_cell):
    cell = new_cell()
    sequence = cell.add([1, 2])
    outcomes = []
    for _ in range(3):
        cell.scheduler.apply_update(cell.kv.apply(cell.scheduler.plan_update()))
        assert cell.scheduler.num_running == 1
        outcomes.append(cell.scheduler.abandon())
        cell.kv.restart()
    assert outcomes == [[], [], [sequence]]


def test_a_request_at_whose_opening_workers_die_again_and_again_is_given_up(new_cell):
    cell = new_cell()
    sequence = cell.add([1, 2])
    outcomes = []
    for _ in range(3):
        cell.scheduler.plan_update()
        outcomes.append(cell.scheduler.abandon())
    assert outcomes == [[], [], [sequence]]
    assert cell.scheduler.num_waiting == 0


def test_an_answer_about_other_sequences_is_not_taken(new_cell):
    cell = new_cell()
    cell.add([1, 2])
    cell.turn()
    step = cell.scheduler.plan_step()
    result = cell.stream.run(step, cell.stream.granted())
    result.tokens.clear()
    with pytest.raises(WorkerUnavailable):
        cell.scheduler.apply_result(result)
