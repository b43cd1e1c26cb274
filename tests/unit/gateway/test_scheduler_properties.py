from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=14),  # few tokens: prefixes are shared
        st.integers(1, 14),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=8,
)
shapes = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(7, 24),  # 28 tokens at least: each request fits alone
        "block_size": st.just(4),
        "token_budget": st.integers(1, 12),
        "max_running": st.integers(1, 8),
    }
)


@settings(deadline=None, max_examples=200)
@given(shapes, requests, st.data())
def test_every_request_ends_as_if_it_were_alone_however_small_the_pool(
    new_cell, shape, asked, data
):
    cell = new_cell(**shape)
    arrivals = list(asked)
    busy = True
    while arrivals or busy:
        while arrivals and (not busy or data.draw(st.booleans(), "arrives")):
            prompt_ids, max_tokens, seed = arrivals.pop(0)
            cell.add(prompt_ids, max_tokens, seed=seed)
        busy = cell.turn(update_first=data.draw(st.booleans(), "update first"))
    for sequence in cell.groups:
        assert cell.outputs[sequence.request.request_id] == cell.expected(sequence)
    assert not cell.failures
    assert cell.first_opens == [sequence.request.request_id for sequence in cell.groups]
    cell.assert_empty()


@settings(deadline=None, max_examples=200)
@given(shapes, requests, st.data())
def test_cancels_at_any_time_disturb_nobody_and_leave_nothing(new_cell, shape, asked, data):
    cell = new_cell(**shape)
    for prompt_ids, max_tokens, seed in asked:
        cell.add(prompt_ids, max_tokens, seed=seed)
    ended = set()
    while cell.turn(update_first=data.draw(st.booleans(), "update first")):
        if data.draw(st.integers(0, 3), "cancels") == 0:
            index = data.draw(st.integers(0, len(asked) - 1), "which")
            if not cell.groups[index].is_ended:
                ended.add(index)
                cell.scheduler.end(cell.groups[index])
    for index, sequence in enumerate(cell.groups):
        output, expected = cell.outputs[f"r{index}"], cell.expected(sequence)
        assert output == expected[: len(output)]
        assert index in ended or output == expected
    assert not cell.failures
    cell.assert_empty()
