"""What a worker refuses before it has loaded a model or attached a pool."""

from __future__ import annotations

import pytest

from compute import cupy_runtime
from compute.errors import CudaUnavailable, DtypeUnsupported
from services.common import config
from services.common.startup import StartupError
from services.compute import worker


class NoPool:
    def attach_pool(self, shape):
        raise AssertionError("attached")


def load(monkeypatch, tmp_path, *flags: str):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(worker.threads, "configure", lambda _: None)
    flags = ("--model=/nowhere", *flags)
    settings = config.load(config.WorkerSettings, "test", list(flags))
    return worker.load(settings, NoPool(), lambda *_: None)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--dtype=float16"], "--dtype float16 is not computed on a CPU.*float32 or bfloat16"),
        (["--kv-dtype=int8"], "--kv-dtype int8 .* with --dtype float32.*--kv-dtype auto"),
        (["--kv-dtype=fp8_e4m3"], "--kv-dtype fp8_e4m3"),
        (["--kv-dtype=bfloat16"], "--kv-dtype bfloat16 .* with --dtype float32"),
        (["--dtype=bfloat16", "--kv-dtype=float16"], "--kv-dtype float16"),
    ],
)
def test_types_that_a_cpu_has_no_kernels_for_are_named(monkeypatch, tmp_path, flags, words):
    with pytest.raises(DtypeUnsupported, match=words):
        load(monkeypatch, tmp_path, *flags)


@pytest.mark.parametrize("flags", [[], ["--dtype=bfloat16", "--kv-dtype=bfloat16"]])
def test_others_go_on_to_the_model(monkeypatch, tmp_path, flags):
    with pytest.raises(StartupError, match="nowhere"):
        load(monkeypatch, tmp_path, *flags)


def test_a_gpu_needs_cupy_and_a_device(monkeypatch, tmp_path):
    def missing():
        raise CudaUnavailable("no CuPy")

    monkeypatch.setattr(cupy_runtime, "connect", missing)
    with pytest.raises(CudaUnavailable, match="no CuPy"):
        load(monkeypatch, tmp_path, "--device=cuda")


def test_computing_on_a_gpu_is_said_to_be_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(cupy_runtime, "connect", lambda: None)
    with pytest.raises(StartupError, match=r"--device cuda:1: .* not built yet.*--device cpu"):
        load(monkeypatch, tmp_path, "--device=cuda:1")
