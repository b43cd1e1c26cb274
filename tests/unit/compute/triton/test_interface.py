"""The class that meets the interface, and how configurations are chosen."""

from __future__ import annotations

import inspect
import os
import sys

import pytest
import torch

from compute.kernels import Kernels
from compute.kernels.triton import TritonKernels
from compute.kernels.triton.launch import Config, Launch
from compute.kernels.triton.tuning import Tuner
from tests.unit.compute.triton.support import ORACLE, Paged, randn, tolerance


def test_all_methods_of_the_interface_are_there_with_its_arguments():
    methods = {name: x for name, x in vars(Kernels).items() if not name.startswith("_")}
    assert len(methods) >= 10
    for name, method in methods.items():
        ours = inspect.signature(getattr(TritonKernels, name))
        assert ours == inspect.signature(method), name


def test_a_layer_through_the_interface(device):
    """All methods of a decoder's layer in a row: arguments are passed on in their order."""
    x = randn(3, 64)
    weight, bias = randn(64, seed=1), randn(64, seed=2)
    results = []
    for kernels, where in ((TritonKernels(), device), (ORACLE, torch.device("cpu"))):
        given = [y.clone().to(where) for y in (x, weight, bias)]
        row, w, b = given
        sums, out = row.clone(), torch.empty_like(row)
        kernels.rms_norm(row, w, 1e-5, out)
        kernels.layer_norm(out, w, b, 1e-5, row)
        kernels.add_rms_norm(row, sums, w, 1e-5, out)
        kernels.add_layer_norm(out, sums, w, b, 1e-5, row)
        half = torch.empty(3, 32, device=where)
        kernels.activate_mul("gelu", row, half)
        kernels.activate("silu", half, half)
        paged = Paged([20, 3], head_size=32).to(where)
        qkv = torch.cat((row, row, row), dim=1)
        slots = (paged.tables[:, 0].long() * 16)[[0, 0, 1]] + torch.tensor([0, 1, 2]).to(where)
        angles = randn(3, 32, seed=3).to(where)
        kernels.rope_write_kv(qkv, angles.cos(), angles.sin(), slots, paged.kv, 2)
        q = qkv.view(3, 6, 32)[:, :2]
        decoded, filled = (torch.empty(n, 2, 32, device=where) for n in (2, 3))
        first_rows = torch.tensor([0, 2, 3], dtype=torch.int32, device=where)
        kernels.paged_decode(q[1:], paged.kv, paged.tables, paged.seq_lens, 0.2, decoded)
        rest = (first_rows, paged.seq_lens, 0.2, filled)
        kernels.paged_prefill(q, paged.kv, paged.tables, *rest)
        kernels.copy_blocks(paged.pool, [(0, 1), (1, 2)])
        results.append([y.cpu() for y in (out, row, sums, half, decoded, filled, paged.pool)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, equal_nan=True, **tolerance(torch.float32))


class FakeKernel:
    """Keeps with which numbers of warps it was launched."""

    def __init__(self):
        self.warps = []

    def __getitem__(self, grid):
        return lambda x, num_warps, num_stages: self.warps.append(num_warps)


@pytest.fixture
def fake():
    kernel = FakeKernel()

    def plan(choice):
        return [Launch(kernel, (1,), {"x": torch.zeros(1)}, Config(2**choice))]

    return kernel, plan


def test_without_trials_the_first_candidate_runs(fake):
    kernel, plan = fake
    Tuner().run("key", lambda: 3, plan)
    assert kernel.warps == [1]


def test_the_fastest_candidate_runs_and_is_tried_once(fake):
    kernel, plan = fake
    times = iter([3.0, 1.0, 2.0])

    def measure(run):
        run()
        return next(times)

    tuner = Tuner(True, measure)
    tuner.run("key", lambda: 3, plan)
    tuner.run("key", lambda: 3, plan)
    assert kernel.warps == [1, 2, 4, 2, 2]


def test_empty_grids_are_not_launched(fake):
    kernel, _ = fake
    Launch(kernel, (3, 0), {"x": torch.zeros(1)}, Config(1)).run()
    assert kernel.warps == []


def test_the_interpreter_is_not_left_on_for_others():
    if "TRITON_INTERPRET" in os.environ:
        pytest.skip("it was on from outside")
    assert "triton" in sys.modules
