"""A runner whose pool is another process's device memory: what it does when that process ends."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from compute.cuda_pool import CudaIpcMapper
from compute.errors import ModelUnsupported, PoolUnavailable
from compute.fake_cuda import FakeCuda
from compute.fakes import PrivatePool, SimpleDriver
from compute.types import KvShape, PoolHandle, PoolLayout, Step
from kvstore.fake_cuda import FakeCuda as ExportingCuda
from tests.cuda_exporter import ExporterProcess

PROMPTS = {"a": list(range(1, 30)), "b": [5, 4, 3]}


class Provider:
    """The pool of the exporter that runs; a new one starts only if the old pool is unmapped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.exporter: ExporterProcess | None = None
        self.is_away = False
        self.made: list[ExporterProcess] = []

    def attach_pool(self, shape: KvShape) -> PoolHandle:
        if self.is_away:
            raise PoolUnavailable("the kvstore is away")
        if self.exporter is None:
            for old in self.made:
                assert old.pages.name not in Path("/proc/self/maps").read_text()
            self.exporter = ExporterProcess(self.folder, PoolLayout(shape, 8, 32))
            self.made.append(self.exporter)
        return self.exporter.handle

    def kill(self) -> None:
        self.exporter.kill()
        self.exporter = None


@pytest.fixture
def provider() -> Iterator[Provider]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-") as path:
        # Room for one pool.
        ExportingCuda.build(Path(path), [2 * 2**20])
        provider = Provider(Path(path))
        yield provider
        for exporter in provider.made:
            exporter.kill()


@pytest.fixture
def runner(make_model, provider):
    mapper = CudaIpcMapper(FakeCuda(provider.folder), 0)
    runner = make_model().runner(provider, map_memory=mapper)
    yield runner
    runner.close()


def generated(runner) -> list[list[int]]:
    answers = SimpleDriver(runner).generate(PROMPTS, 8)
    return [answers[name].token_ids for name in PROMPTS]


def test_the_next_pool_is_attached_once_the_old_one_is_unmapped(runner, provider):
    before, handle = generated(runner), runner.handle()
    runner.refresh_pool()
    assert runner.handle() is handle
    provider.kill()
    runner.refresh_pool()
    assert runner.handle().generation != handle.generation
    assert generated(runner) == before
    provider.kill()
    runner.refresh_pool()
    assert generated(runner) == before


def test_a_pool_whose_exporter_has_ended_is_let_go_even_if_there_is_no_other(runner, provider):
    before = generated(runner)
    provider.kill()
    provider.is_away = True
    for _ in range(2):
        with pytest.raises(PoolUnavailable, match="away"):
            runner.refresh_pool()
        assert provider.made[0].pages.name not in Path("/proc/self/maps").read_text()
        with pytest.raises(PoolUnavailable, match="closed"):
            runner.run(Step(1))
    provider.is_away = False
    runner.refresh_pool()
    assert generated(runner) == before


def test_a_pool_whose_exporter_lives_stays_attached_while_the_kvstore_is_out_of_reach(
    runner, provider
):
    before = generated(runner)
    provider.is_away = True
    with pytest.raises(PoolUnavailable, match="away"):
        runner.refresh_pool()
    assert generated(runner) == before


def test_a_draft_models_kv_is_not_quantized(make_model):
    model = make_model()
    with (
        PrivatePool(num_blocks=4, block_size=8) as pool,
        pytest.raises(ModelUnsupported, match="--kv-dtype auto"),
    ):
        model.runner(pool, draft=model.decoder, kv_dtype="int8")


def test_the_pool_has_the_type_that_is_asked_for(make_model):
    with PrivatePool(num_blocks=4, block_size=8) as pool:
        runner = make_model().runner(pool, kv_dtype="fp8_e4m3")
        assert runner.info().kv_shape.dtype == "fp8_e4m3"
        assert runner.handle().layout.shape.dtype == "fp8_e4m3"
        runner.close()
