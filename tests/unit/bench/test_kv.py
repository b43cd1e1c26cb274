"""The page manager's benchmarks: what they count, on traces that can be counted by hand."""

from __future__ import annotations

import argparse

from bench import events, kv, kv_hits
from bench.workload import Shape


def test_equal_ids_of_a_trace_give_equal_tokens_and_others_differ():
    first = kv.tokens_of(Shape(0.0, 700, 1, (5, 6)))
    second = kv.tokens_of(Shape(0.0, 1024, 1, (5, 7)))
    assert len(first) == 700
    assert first[:512] == second[:512]
    assert not set(first[512:]) & set(second[512:])


def test_hits_are_those_of_the_longest_prefix():
    prompts = [(1, 2, 3), (1, 2, 4), (2, 3), (1, 2, 4)]
    assert kv_hits.through_manager(prompts, 50) == 5 / 11
    assert kv_hits.through_manager(prompts, 3) == 0.0  # none of three fits beside its last token


def test_least_recently_used_blocks_go_first_and_belady_keeps_what_returns():
    prompts = [(1,), (2,), (3,), (1,)]
    assert kv_hits.through_manager(prompts, 3) == 0.0
    assert kv_hits.belady(prompts, 2) == 1 / 4
    assert kv_hits.through_manager(prompts, 5) == 1 / 4


def test_a_replay_times_every_operation_and_leaves_nothing_open():
    options = argparse.Namespace(num_blocks=64, block_size=16, running=2, most_output=20)
    shapes = [Shape(0.0, 40, 30, (1,)), Shape(0.0, 40, 3, (1,)), Shape(0.0, 40, 17, (2,))]
    replay = kv.Replay(shapes, options)
    replay.run()
    report = replay.report()
    assert set(report["microseconds"]) == {"open", "publish", "extend", "commit", "close"}
    assert replay.counts["extend"] == 20 + 3 + 17
    assert report["hit_ratio"] == 32 / 120
    assert replay.manager.stats().num_held == 0
    assert replay.manager.audit() == []


def test_the_cost_of_events_is_measured_for_every_case(monkeypatch):
    monkeypatch.setattr(events, "_REPEATS", 1)
    figures = events.measure(argparse.Namespace(num_blocks=4096, block_size=8))
    assert len(figures) == 4 + 1 + 2 * 3
    assert all(figure > 0 for figure in figures.values())
