"""What bench/serve.py asks for, and what it makes of the answers."""

from __future__ import annotations

import gzip
import math

import pytest

from bench import serve, workload
from bench.serve import Outcome
from bench.workload import Shape


def test_lengths_have_the_means_that_were_asked_for():
    shapes = workload.synthetic(20_000, 160.0, 340.0, 1.0, seed=1)
    assert sum(s.num_input for s in shapes) / 20_000 == pytest.approx(160, rel=0.05)
    assert sum(s.num_output for s in shapes) / 20_000 == pytest.approx(340, rel=0.05)


def test_no_spread_makes_all_lengths_equal():
    assert set(workload.synthetic(50, 128, 64, 0.0, seed=1)) == {Shape(0.0, 128, 64)}


def test_same_seed_same_workload():
    def make(seed):
        shapes = workload.synthetic(10, 20, 5, 1.0, seed)
        return workload.build(shapes, workload.arrivals(10, 2.0, seed), 100, seed)

    assert make(1) == make(1)
    assert make(1) != make(2)


def test_arrivals_come_at_the_rate_in_order():
    times = workload.arrivals(20_000, 4.0, seed=1)
    assert times == sorted(times)
    assert 20_000 / times[-1] == pytest.approx(4.0, rel=0.05)
    assert workload.arrivals(3, math.inf, seed=1) == [0.0] * 3


def test_equal_blocks_of_a_trace_give_equal_prefixes(tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    rows = [
        '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}',
        '{"timestamp": 1500, "input_length": 700, "output_length": 6, "hash_ids": [7, 9]}',
    ]
    path.write_bytes(gzip.compress("\n".join(rows).encode()))
    shapes = workload.trace(path, count=10)
    (first, second), num_cut = workload.build(shapes, [s.at for s in shapes], 10_000, seed=0)
    assert (first.at, second.at) == (0.0, 1.5)
    assert (len(first.prompt_ids), len(second.prompt_ids)) == (600, 700)
    assert first.prompt_ids[:512] == second.prompt_ids[:512]
    assert first.prompt_ids[512:600] != second.prompt_ids[512:600]
    assert num_cut == 0


def test_azure_trace_is_read_with_its_times(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:47.1805900,396,109\n"
    )
    assert workload.trace(path, count=1) == [Shape(0.0, 374, 44)]
    assert workload.trace(path, count=5)[1] == Shape(0.5, 396, 109)


@pytest.mark.parametrize(
    ("name", "text"), [("a.txt", "x"), ("a.jsonl", "{}"), ("a.csv", "A,B\n1,2\n"), ("a.csv", "")]
)
def test_file_that_is_no_trace_is_refused(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=name):
        workload.trace(tmp_path / name, count=5)


@pytest.mark.parametrize("shape", [(500, 10), (10, 500), (500, 500), (100, 1), (1, 100)])
def test_requests_are_cut_to_the_length(shape):
    [request], num_cut = workload.build([Shape(0.0, *shape)], [0.0], 100, seed=0)
    assert 1 <= len(request.prompt_ids) <= shape[0]
    assert 1 <= request.max_tokens <= shape[1]
    assert len(request.prompt_ids) + request.max_tokens == 100
    assert num_cut == 1


def test_summary_counts_errors_apart():
    good = Outcome(1.0, [1.5, 2.0, 3.0], 3.0, 10, 4, 3)
    result = serve.summary([good, Outcome(1.0, end=1.1, error="429 queue_full")], seconds=2.0)
    assert result["errors"] == {"429 queue_full": 1}
    assert (result["num_requests"], result["num_finished"]) == (2, 1)
    assert result["output_tokens_per_second"] == 1.5
    assert result["ttft"]["p50"] == 0.5
    assert result["itl"]["mean"] == 0.75
    assert result["tpot"]["mean"] == 0.75
    assert result["e2e"]["p99"] == 2.0


def test_summary_of_nothing_has_no_times():
    result = serve.summary([Outcome(0.0, error="ConnectError")], seconds=1.0)
    assert result["ttft"] is None
    assert result["output_tokens"] == 0
