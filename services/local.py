"""The three domains wired in one process: for benchmarks and tests, and for comparison."""

from __future__ import annotations

import dataclasses

from compute import types as ct
from compute.errors import PoolUnavailable
from compute.runner import StepRunner
from gateway.engine import Engine, EngineSettings
from gateway.tokenizer import Tokenizer
from kvstore import types as kv
from kvstore.attachment import ManagerOptions
from kvstore.errors import KvStoreError
from kvstore.manager import PageManager
from services.common import config, model_files
from services.common.model_files import Progress
from services.compute import worker
from services.compute.step_thread import new_executor
from services.gateway.compute_clients import LocalCompute
from services.gateway.kvstore_clients import LocalKvStore


class LocalPoolProvider:
    """compute.ports.PoolProvider over a page manager in this process."""

    def __init__(self, manager: PageManager) -> None:
        self._manager = manager

    def attach_pool(self, shape: ct.KvShape) -> ct.PoolHandle:
        try:
            handle = self._manager.attach_pool(kv.KvShape(**dataclasses.asdict(shape)))
        except KvStoreError as error:
            raise PoolUnavailable(str(error), **error.metadata) from None
        host = self._manager.get_host_pool()
        return dataclasses.replace(
            _handle(handle, shape), host=None if host is None else _handle(host, shape)
        )


def _handle(handle: kv.PoolHandle, shape: ct.KvShape) -> ct.PoolHandle:
    layout = handle.layout
    if not isinstance(handle.memory, kv.PosixMemory):  # CUDA IPC does not map one's own memory
        raise PoolUnavailable("in one process the pool is in shared memory: --device cpu")
    return ct.PoolHandle(
        memory=ct.PosixMemory(handle.memory.name),
        offset_bytes=handle.offset_bytes,
        size_bytes=handle.size_bytes,
        layout=ct.PoolLayout(shape, layout.block_size, layout.num_blocks),
        generation=handle.generation,
    )


class LocalQuire:
    """A page manager, a step runner and an engine in this process.

    States: created, started, stopped.
    """

    def __init__(
        self,
        settings: config.WorkerSettings,
        *,
        kv_memory_bytes: int,
        block_size: int = 16,
        host_memory_bytes: int = 0,
        engine_settings: EngineSettings | None = None,
        progress: Progress = lambda _stage, _done, _total: None,
    ) -> None:
        """Load the model and make the pool. Raises what worker.load and PageManager raise."""
        found = model_files.find(settings.model, settings.cache_dir, progress)
        self.manager = PageManager(ManagerOptions(kv_memory_bytes, block_size, host_memory_bytes))
        executor = new_executor()
        provider = LocalPoolProvider(self.manager)
        self.runner: StepRunner = executor.submit(
            worker.load, settings, provider, progress
        ).result()
        self.engine = Engine(
            LocalKvStore(self.manager),
            LocalCompute(self.runner, executor),
            Tokenizer.load(found.directory),
            engine_settings,
        )

    async def start(self) -> None:
        await self.engine.start()

    async def stop(self) -> None:
        await self.engine.stop()
        self.runner.close()
        self.manager.close()
