"""The team that kernels run on."""

from __future__ import annotations

import ctypes

import pytest

from compute import threads

_Kernel = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_int64))


def test_every_thread_runs_the_kernel_once():
    team = threads.Team(3)
    thread_number = ctypes.CFUNCTYPE(ctypes.c_int)(team.thread_number)
    seen = []
    kernel = _Kernel(lambda arguments: seen.append((thread_number(), arguments[0])))
    address = ctypes.cast(kernel, ctypes.c_void_p).value
    team.run(address, bytes(ctypes.c_int64(7)))
    assert sorted(seen) == [(n, 7) for n in range(team.num_threads)]


def test_a_kernel_can_run_on_the_calling_thread_alone():
    seen = []
    kernel = _Kernel(lambda arguments: seen.append(arguments[0]))
    address = ctypes.cast(kernel, ctypes.c_void_p).value
    threads.Team(3).run_alone(address, bytes(ctypes.c_int64(7)))
    assert seen == [7]


def test_no_threads_are_refused():
    with pytest.raises(ValueError, match="num_threads"):
        threads.configure(0)
