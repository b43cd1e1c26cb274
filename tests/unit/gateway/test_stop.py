from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.stop import StopFilter


def run(stops, parts, **options):
    """Text let through, part by part, then the flush; and whether it stopped."""
    stop = StopFilter(stops, **options)
    return [*(stop.push(part) for part in parts), stop.flush()], stop.is_stopped


def test_without_stop_strings_text_passes_at_once():
    assert run((), ["a", "", "b"]) == (["a", "", "b", ""], False)


def test_a_stop_string_across_parts_is_not_shown_at_all():
    assert run(("END",), ["one E", "N", "D two"]) == (["one ", "", "", ""], True)


def test_what_only_began_like_a_stop_string_comes_out_when_that_is_certain():
    assert run(("END",), ["E", "N", "x"]) == (["", "", "ENx", ""], False)


def test_what_is_still_held_at_the_end_is_flushed():
    assert run(("END",), ["xEN"]) == (["x", "EN"], False)


def test_a_pattern_that_overlaps_itself_is_found():
    assert run(("aab",), ["aa", "ab", "c"]) == (["", "a", "", ""], True)


def test_of_stop_strings_that_end_together_the_longest_counts():
    assert run(("c", "bc"), ["abc"]) == (["a", ""], True)


def test_nothing_passes_after_a_stop():
    stop = StopFilter(("x",))
    assert stop.push("axb") == "a"
    assert stop.push("more") == ""
    assert stop.flush() == ""


def test_the_stop_string_can_be_part_of_the_text():
    assert run(("END",), ["one E", "N", "D two"], echo=True) == (["one E", "N", "D", ""], True)


def test_which_stop_string_was_met_is_known():
    stop = StopFilter(("c", "bc", "x"))
    stop.push("ab")
    assert stop.matched is None
    stop.push("c")
    assert stop.matched == "bc"


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("abc", max_size=4), max_size=10),
    st.booleans(),
)
def test_the_result_does_not_depend_on_where_parts_end(stops, parts, echo):
    text = "".join(parts)
    ends = [end for end in range(len(text) + 1) if text[:end].endswith(tuple(stops))]
    shown, is_stopped = run(stops, parts, echo=echo)
    assert is_stopped == bool(ends)
    if ends:
        end = ends[0]
        longest = max(len(stop) for stop in stops if text[:end].endswith(stop))
        assert "".join(shown) == text[: end if echo else end - longest]
    else:
        assert "".join(shown) == text


@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.text("abc", max_size=12))
def test_only_what_could_become_a_stop_string_is_held_back(stops, text):
    stop, shown = StopFilter(stops), ""
    for end, character in enumerate(text, start=1):
        shown += stop.push(character)
        if stop.is_stopped:
            return
        held = text[len(shown) : end]
        assert not held or any(one.startswith(held) for one in stops)
