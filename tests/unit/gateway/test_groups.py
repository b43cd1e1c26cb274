"""Groups of sequences: samples that share a prompt, beams, and what suspends them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.beam_search import BeamSearch
from gateway.fakes import expected_candidates
from gateway.ports import SamplingOptions
from gateway.preemption import choose_victim
from gateway.speculation import SpeculationMethod
from gateway.types import BeamOptions, EarlyStopping, FinishReason

VOCAB_SIZE = 1000


def names(cell, group):
    request = group.request
    return [
        request.request_id if not i else f"{request.request_id}/{i}"
        for i in range(request.num_sequences)
    ]


def assert_as_expected(cell, group):
    for index, name in enumerate(names(cell, group)):
        assert cell.outputs[name] == cell.expected(group, index)
        assert cell.finishes[name] is FinishReason.LENGTH


@pytest.mark.parametrize("length", [1, 2, 4, 5, 8, 9])
def test_samples_compute_their_prompt_once_and_draw_each_their_own(new_cell, length):
    cell = new_cell()
    group = cell.add(range(length), max_tokens=6, n=4, sampling=SamplingOptions(1.0, seed=3))
    cell.run()
    assert_as_expected(cell, group)
    assert len({tuple(cell.outputs[name]) for name in names(cell, group)}) == 4
    computed = sum(c.num_tokens for step in cell.steps for c in step.chunks)
    assert computed == length + 3 + 4 * 5  # the prompt once, its last token once for each
    cell.assert_empty()


def test_samples_hold_the_prompts_whole_blocks_once(new_cell):
    cell = new_cell(num_blocks=64)
    cell.add(range(21), max_tokens=12, n=4)
    most = 0
    while cell.turn():
        most = max(most, cell.kv.num_blocks - cell.kv.num_free)
    # 5 blocks of the prompt are shared, each has its own 3 for tokens 20 to 31.
    assert most == 5 + 4 * 3


def test_a_leader_that_ends_at_once_leaves_the_prompt_to_the_others(new_cell):
    cell = new_cell()
    group = cell.add(range(6), max_tokens=1, n=3)
    cell.run()
    assert_as_expected(cell, group)
    cell.assert_empty()


def test_one_of_several_ends_alone(new_cell):
    cell = new_cell()
    group = cell.add(range(6), max_tokens=20, n=3)
    while len(cell.outputs["r0/1"]) < 2:
        cell.turn()
    cell.scheduler.end_choice(group, 1)
    cell.run()
    assert len(cell.outputs["r0/1"]) < 5
    assert cell.outputs["r0"] == cell.expected(group)
    assert cell.outputs["r0/2"] == cell.expected(group, 2)
    cell.assert_empty()


def search(prompt, max_tokens, options, stop_ids):
    """The same search over lists, without pages or steps."""
    beams = BeamSearch(options, stop_ids, max_tokens)
    running = [list(prompt)]
    while not beams.is_done:
        candidates = [
            expected_candidates(tokens, beams.num_candidates, VOCAB_SIZE) for tokens in running
        ]
        running = [[*running[b.parent], b.token_id] for b in beams.advance(candidates)]
    return beams.results()


@pytest.mark.parametrize("early_stopping", list(EarlyStopping))
@pytest.mark.parametrize("num_beams", [2, 3, 5])
def test_beams_over_pages_find_what_the_search_alone_finds(new_cell, num_beams, early_stopping):
    options = BeamOptions(num_beams, 0.7, early_stopping)
    prompt = [5, 6, 7, 8, 9]
    eos_ids = [expected_candidates([*prompt, 11], 1, VOCAB_SIZE)[0].token_id, 250]
    cell = new_cell(eos_ids=eos_ids, num_blocks=128)
    other = cell.add([1, 2, 3], max_tokens=20)
    cell.add(prompt, max_tokens=9, n=num_beams, beams=options)
    cell.run()
    expected = search(prompt, 9, options, eos_ids)
    found = [cell.outputs["r1" if not i else f"r1/{i}"] for i in range(num_beams)]
    assert found == [list(result.token_ids) for result in expected]
    assert cell.scores["r1"] == expected[0].score
    assert cell.outputs["r0"] == cell.expected(other)
    cell.assert_empty()


def test_frees_that_come_late_cost_no_more_victims_than_the_shortage(new_cell):
    cell = new_cell(num_blocks=16, block_size=4, kv={"frees_late": 2})
    # Seven have all the room they will need; one, which has the most to lose, needs a block.
    cell.add([1] * 6, max_tokens=4)
    groups = [cell.add([index] * 5, max_tokens=3) for index in range(2, 8)]
    cell.add([9] * 6, max_tokens=3)
    cell.run()
    assert cell.scheduler.preemption_stats().num_groups <= 1
    assert not cell.failures
    for group in [cell.groups[0], *groups]:
        assert cell.outputs[group.request.request_id] == cell.expected(group)


def test_the_victim_is_who_loses_least(new_cell):
    cell = new_cell(num_blocks=40, block_size=4)
    cell.add([1] * 8, max_tokens=60)  # the first is never taken
    big = cell.add([2] * 64, max_tokens=20)
    small = cell.add([3] * 16, max_tokens=20)
    cell.add([4] * 40, max_tokens=20)
    cell.run()
    suspended = [i for update in cell.updates for i in update.suspends]
    assert suspended
    assert not any(i.startswith(big.request.request_id) for i in suspended[:1])
    assert suspended[0].startswith(small.request.request_id)
    for group in cell.groups:
        assert cell.outputs[group.request.request_id] == cell.expected(group)


def test_s2_who_has_less_to_compute_again_goes_first(new_cell):
    """The second and the last, of the same class and age."""
    cell = new_cell(num_blocks=40)
    first, large, small = (cell.add([n] * n, 4) for n in (3, 90, 20))
    large.sequences[0].num_computed, small.sequences[0].num_computed = 4096, 64
    running = [first, small, large]
    assert choose_victim(running, ageing=10.0) is small
    assert choose_victim([first, large, small], ageing=10.0) is small
    small.sequences[0].num_computed = 4096
    assert choose_victim(running, ageing=10.0) is large  # the latest among equals


@pytest.mark.parametrize("host_blocks", [0, 64])
def test_s3_resumes_and_a_head_that_needs_more_than_is_left_all_go_on(new_cell, host_blocks):
    """Two that come back hold 60 % of the pool, the head of the queue needs 50 %."""
    cell = new_cell(num_blocks=40, kv={"host_blocks": host_blocks})
    for n in range(3):
        cell.add([n + 1] * 40, max_tokens=20)
    for _ in range(12):
        cell.turn()
    head = cell.add([9] * 78, max_tokens=2)
    cell.run()
    stats = cell.scheduler.preemption_stats()
    assert stats.num_resumed >= 1
    for group in cell.groups:
        assert_as_expected(cell, group)
    assert cell.outputs[head.request.request_id]
    cell.assert_empty()


def test_the_lowest_class_goes_first_and_waiting_makes_up_for_a_class(new_cell):
    cell = new_cell(max_running=1, ageing=10.0)
    cell.add([1], max_tokens=2)
    cell.turn()
    cell.add([2], priority=1)
    cell.add([3], priority=0)
    cell.add([4], priority=-1)
    cell.now = 11.0  # longer than the difference of one class is worth
    cell.add([5], priority=0)
    cell.run()
    assert cell.first_opens == ["r0", "r3", "r2", "r1", "r4"]


@pytest.mark.parametrize("kv", [{}, {"host_blocks": 64}])
def test_a_group_is_suspended_and_resumed_whole(new_cell, kv):
    cell = new_cell(num_blocks=18, block_size=4, kv=kv)
    first = cell.add([1] * 8, max_tokens=30)
    group = cell.add([2] * 8, max_tokens=20, n=3, sampling=SamplingOptions(seed=5))
    cell.run()
    stats = cell.scheduler.preemption_stats()
    assert stats.num_groups > 0
    assert stats.num_resumed == stats.num_swapped + stats.num_recomputed
    assert (stats.num_swapped > 0) == bool(kv)
    assert cell.outputs["r0"] == cell.expected(first)
    assert_as_expected(cell, group)
    cell.assert_empty()


@pytest.mark.parametrize("token_budget", [7, 20, 512])
def test_beams_whose_kv_is_computed_again_go_on_together(new_cell, token_budget):
    cell = new_cell(num_blocks=17, token_budget=token_budget, max_running=6)
    first = cell.add([1] * 9, max_tokens=40)
    beams = cell.add([2] * 13, max_tokens=14, n=3, beams=BeamOptions(3))
    cell.run()
    assert cell.scheduler.preemption_stats().num_recomputed >= 3
    assert cell.outputs["r0"] == cell.expected(first)
    expected = search([2] * 13, 14, BeamOptions(3), ())
    found = [cell.outputs[name] for name in names(cell, beams)]
    assert found == [list(result.token_ids) for result in expected]
    cell.assert_empty()


def test_cancelling_in_the_middle_of_a_swap_releases_everything(new_cell):
    cell = new_cell(num_blocks=18, block_size=4, kv={"host_blocks": 64})
    for turns in range(100):
        cell.add([turns, 1] * 4, max_tokens=30)
        group = cell.add([turns, 2] * 4, max_tokens=20, n=3)
        for _ in range(5 + turns % 40):
            cell.turn()
        cell.scheduler.end(group)
        cell.run()
        cell.assert_empty()


@pytest.mark.parametrize("method", [SpeculationMethod.NGRAM, SpeculationMethod.DRAFT])
def test_guesses_change_no_token(new_cell, method):
    cell = new_cell(speculation=method, num_drafts=3, num_blocks=128)
    cell.compute.script = lambda known: 50 + len(known) % 3  # what an n-gram can guess
    cell.compute.draft_script = lambda known: 50 + (len(known) + (len(known) % 7 == 0)) % 3
    info = cell.model(has_draft_model=True)
    cell.scheduler.attach(info)
    group = cell.add(range(10), max_tokens=50)
    cell.run()
    assert cell.outputs["r0"] == [50 + n % 3 for n in range(10, 60)]
    stats = cell.scheduler.speculator.stats()
    assert 0 < stats.num_accepted <= stats.num_drafted
    assert len(cell.steps) < 45
    assert group.is_ended
    cell.assert_empty()


def test_guesses_that_are_always_wrong_are_given_up(new_cell):
    cell = new_cell(speculation=SpeculationMethod.DRAFT, num_drafts=4, num_blocks=128)
    cell.compute.draft_script = lambda _known: 7
    cell.scheduler.attach(cell.model(has_draft_model=True))
    group = cell.add(range(10), max_tokens=200)
    cell.run()
    assert cell.outputs["r0"] == cell.expected(group)
    assert cell.scheduler.speculator.stats().num_drafted < 200
    cell.assert_empty()


def test_prompt_scores_come_once_however_the_prompt_is_cut(new_cell):
    cell = new_cell(token_budget=5)
    cell.add(range(14), 3, sampling=SamplingOptions(return_prompt_logprobs=True), salt="own")
    cell.run()
    scored = [t.token_id for part in cell.prompt_scores["r0"] for t in part.tokens]
    assert scored == list(range(1, 14))


def test_a_sequence_that_fails_ends_its_group_alone(new_cell):
    cell = new_cell()
    broken = cell.add(range(6), n=2)
    other = cell.add(range(20, 26))
    cell.compute.fails = ("r0.",)
    cell.run()
    assert [(group, error.reason) for group, error in cell.failures] == [
        (broken, "LOGITS_NOT_FINITE")
    ]
    assert cell.outputs["r1"] == cell.expected(other)
    cell.assert_empty()


asked_groups = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=18),
        st.integers(1, 14),
        st.integers(1, 4),  # sequences
        st.sampled_from(["sample", "beam"]),
        st.integers(-2, 2),  # priority
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=200)
@given(
    asked_groups,
    st.integers(34, 60),
    st.sampled_from([{}, {"host_blocks": 8}, {"host_blocks": 64}, {"frees_late": 2}]),
    st.sampled_from(list(SpeculationMethod)),
    st.data(),
)
def test_groups_of_all_kinds_end_as_if_alone_however_small_the_pool(
    new_cell, asked, num_blocks, kv, method, data
):
    cell = new_cell(num_blocks=num_blocks, kv=kv, token_budget=9, max_running=6, speculation=method)
    cell.compute.draft_script = lambda known: len(known) % 5
    cell.scheduler.attach(cell.model(has_draft_model=True))
    arrivals, busy, ended = list(asked), True, set()
    while arrivals or busy:
        while arrivals and (not busy or data.draw(st.booleans(), "arrives")):
            prompt_ids, max_tokens, width, kind, priority = arrivals.pop(0)
            options = {"n": width, "priority": priority}
            if kind == "beam":
                options["beams"] = BeamOptions(max(2, width))
            cell.add(prompt_ids, max_tokens, **options)
        if cell.groups and data.draw(st.integers(0, 30), "cancels") == 0:
            group = data.draw(st.sampled_from(cell.groups), "which")
            if not group.is_ended:
                cell.scheduler.end(group)
                ended.add(group)
        cell.now += 0.5
        busy = cell.turn(update_first=data.draw(st.booleans(), "update first"))
    assert not cell.failures
    for group in cell.groups:
        if group in ended:
            continue
        request = group.request
        if request.beams is None:
            assert_as_expected(cell, group)
        else:
            expected = search(request.prompt_ids, request.max_tokens, request.beams, ())
            found = [cell.outputs[name] for name in names(cell, group)[: request.n]]
            assert found == [list(result.token_ids) for result in expected[: request.n]]
    cell.assert_empty()
