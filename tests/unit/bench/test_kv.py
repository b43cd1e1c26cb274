"""The page manager's benchmarks: what they count, on traces that can be counted by hand."""

from __future__ import annotations

import argparse
import json

from bench import events, kv, kv_hits, kv_prompts, kv_report
from bench.workload import Shape


def test_equal_ids_of_a_trace_give_equal_tokens_and_others_differ():
    first = kv.tokens_of(Shape(0.0, 700, 1, (5, 6)))
    second = kv.tokens_of(Shape(0.0, 1024, 1, (5, 7)))
    assert len(first) == 700
    assert first[:512] == second[:512]
    assert not set(first[512:]) & set(second[512:])


def test_hits_are_those_of_the_longest_prefix():
    prompts = [(1, 2, 3), (1, 2, 4), (2, 3), (1, 2, 4)]
    assert kv_hits.through_manager(prompts, 50)[0] == 5 / 11
    assert kv_hits.through_manager(prompts, 50, "lhd", expand=4)[0] == 5 / 11
    assert kv_hits.unlimited(prompts) == 5 / 11
    assert kv_hits.through_manager(prompts, 3)[0] == 0.0  # none of three fits beside its last token


def test_least_recently_used_blocks_go_first_and_belady_keeps_what_returns():
    prompts = [(1,), (2,), (3,), (1,)]
    assert kv_hits.through_manager(prompts, 3, "lru")[0] == 0.0
    assert kv_hits.belady(prompts, 2) == 1 / 4
    assert kv_hits.through_manager(prompts, 5, "lru")[0] == 1 / 4


def test_sessions_of_agents_share_nothing_and_come_in_the_order_of_time(tmp_path):
    sessions = [
        {"id": "a", "block_size": 64, "requests": [_agents(0.0, 1, 2), _agents(9.0, 1, 2, 3)]},
        {"id": "b", "block_size": 64, "requests": [_agents(0.0, 1), _agents(5.0, 1, 2)]},
    ]
    path = tmp_path / "sessions.jsonl"
    path.write_text("".join(json.dumps(session) + "\n" for session in sessions))
    prompts = kv_prompts.read(path)
    assert (prompts.block_tokens, prompts.num_blocks) == (64, 8)
    assert [len(blocks) for blocks in prompts.blocks] == [2, 1, 2, 3]
    first, other, second, last = prompts.blocks
    assert last[:2] == first
    assert second[:1] == other
    assert not set(second) & set(last)


def _agents(at: float, *ids: int) -> dict[str, object]:
    return {"t": at, "in": 64 * len(ids), "out": 1, "hash_ids": ids}


def test_prompts_of_a_trace_without_prefixes_are_all_different(tmp_path):
    path = tmp_path / "azure.csv"
    row = "2023-11-16 18:15:46.6805900,{},10\n"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + row.format(33) + row.format(16))
    prompts = kv_prompts.read(path)
    assert not prompts.shares
    assert prompts.blocks == [(0, 1, 2), (3,)]


def test_a_report_has_every_policy_beside_the_best_and_can_be_drawn(tmp_path):
    prompts = kv_prompts.Prompts("test", 512, [(1,), (2,), (3,), (1,)], (1536,))
    report = kv_hits.measure(prompts, [1536, 2560], ["lhd", "lru"], 1)
    assert report["unlimited"] == 1 / 4
    assert [row["hit_ratio"]["belady"] for row in report["capacities"]] == [1 / 4, 1 / 4]
    assert report["capacities"][1]["hit_ratio"]["lru"] == 1 / 4
    kv_report.show(report)
    kv_report.plot(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_replay_times_every_operation_and_leaves_nothing_open():
    options = argparse.Namespace(
        num_blocks=64, block_size=16, running=2, most_output=20, eviction="lru"
    )
    shapes = [Shape(0.0, 40, 30, (1,)), Shape(0.0, 40, 3, (1,)), Shape(0.0, 40, 17, (2,))]
    replay = kv.Replay(shapes, options)
    replay.run()
    report = replay.report()
    assert set(report["microseconds"]) == {"open", "publish", "extend", "commit", "close"}
    assert replay.counts["extend"] == 20 + 3 + 17
    assert report["hit_ratio"] == 32 / 120
    assert replay.manager.stats().num_held == 0
    replay.manager.close()
    assert replay.manager.audit() == []


def test_the_cost_of_events_is_measured_for_every_case(monkeypatch):
    monkeypatch.setattr(events, "_REPEATS", 1)
    figures = events.measure(argparse.Namespace(num_blocks=4096, block_size=8))
    assert len(figures) == 4 + 1 + 2 * 3
    assert all(figure > 0 for figure in figures.values())
