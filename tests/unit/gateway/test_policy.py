"""Parts of the policy alone: the pace of prompts, patience for blocks, the queue."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.group import SequenceGroup
from gateway.limits import Limits
from gateway.pace import Pace
from gateway.preemption import Preemption
from gateway.types import GenerationRequest
from gateway.wait_queue import WaitQueue


def test_prompts_fill_a_step_up_to_its_time():
    pace = Pace(target=0.1)
    assert pace.allowance(4, 512) == 32  # nothing is known yet: others wait for few of them
    assert pace.allowance(4, 20) == 20
    pace.observe(4, 10, 5.0)  # too few to say what they cost
    assert pace.allowance(4, 512) == 32
    pace.observe(4, 0, 0.02)
    pace.observe(4, 400, 0.02 + 400 * 0.001)
    assert pace.allowance(4, 512) == 80
    assert pace.allowance(4, 50) == 50
    assert pace.allowance(0, 512) == 512  # nobody waits for a token


def test_prompts_go_on_however_slow_they_are():
    pace = Pace(target=0.1)
    pace.observe(4, 0, 0.2)
    pace.observe(4, 100, 1.2)
    assert pace.allowance(4, 512) == 16


def test_no_target_is_no_bound():
    pace = Pace(target=0.0)
    pace.observe(1, 0, 1.0)
    pace.observe(1, 100, 9.0)
    assert pace.allowance(1, 512) == 512


def test_promised_blocks_are_waited_for_but_not_for_ever():
    preemption = Preemption()
    assert preemption.is_needed(1)
    preemption.promise(3)
    assert not preemption.is_needed(3)
    assert preemption.is_needed(4)
    preemption.grant(2)
    assert preemption.is_needed(2)
    for _ in range(4):
        preemption.answer()
    assert preemption.is_needed(1)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(-5, 5)), max_size=30), st.data())
def test_the_queue_is_in_order_whatever_comes_and_goes(arrivals, data):
    queue, groups = WaitQueue(), []
    for number, (arrival, priority) in enumerate(arrivals):
        request = GenerationRequest(f"r{number}", [1], priority=priority)
        group = SequenceGroup(request, 9, (), arrival=arrival, number=number, ageing=3.0)
        queue.add(group)
        groups.append(group)
        if data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(groups))
            queue.remove(gone)
            groups.remove(gone)
    assert list(queue) == sorted(groups, key=lambda group: group.key)


def test_what_does_not_wait_cannot_be_removed():
    group = SequenceGroup(GenerationRequest("r", [1]), 9, ())
    with pytest.raises(ValueError, match="does not wait"):
        WaitQueue().remove(group)


@pytest.mark.parametrize(
    "wrong", [{"ageing": 0}, {"watermark": 1.0}, {"step_target": -1}, {"num_drafts": 33}]
)
def test_limits_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=r"must be|out of range"):
        Limits(**wrong)
