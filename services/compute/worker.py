"""A step runner from settings."""

from __future__ import annotations

import os

from compute import cupy_runtime, threads
from compute.dtypes import check_cpu
from compute.kernels.cpu import CpuKernels
from compute.layer import Parts
from compute.linear import Int8Linear, Linear
from compute.loading import LoadedModel, load_model, read_eos_ids
from compute.ports import PoolProvider
from compute.runner import StepRunner
from compute.sampling import GrammarCompiler
from services.common import model_files
from services.common.config import WorkerSettings
from services.common.model_files import ModelFiles, Progress
from services.common.option_values import device_number
from services.common.startup import StartupError


def load(settings: WorkerSettings, provider: PoolProvider, progress: Progress) -> StepRunner:
    """Load the model, and its draft if there is one, compile the kernels, attach the pool.

    Blocks for seconds. Raises StartupError, DtypeUnsupported, CudaUnavailable, and what
    load_model and StepRunner raise.
    """
    if device_number(settings.device) is None:
        return _load_on_cpu(settings, provider, progress)
    return _load_on_cuda(settings)


def _load_on_cuda(settings: WorkerSettings) -> StepRunner:
    cupy_runtime.connect()
    raise StartupError(
        f"--device {settings.device}: computing on a GPU is not built yet; choose --device cpu"
    )


def _load_on_cpu(
    settings: WorkerSettings, provider: PoolProvider, progress: Progress
) -> StepRunner:
    kv_dtype = settings.dtype if settings.kv_dtype == "auto" else settings.kv_dtype
    check_cpu(settings.dtype, kv_dtype)
    threads.configure(settings.threads or len(os.sched_getaffinity(0)))
    kernels = CpuKernels()
    found = model_files.find(settings.model, settings.cache_dir, progress)
    loaded = _load(found, settings, kernels, progress, "load weights")
    text = (found.directory / "tokenizer.json").read_text(encoding="utf-8")
    eos_ids = read_eos_ids(found.directory)
    grammars = GrammarCompiler(text, loaded.decoder.config.vocab_size, eos_ids)
    draft = None
    if settings.draft_model:
        files = model_files.find(settings.draft_model, settings.cache_dir, progress)
        draft = _load(files, settings, kernels, progress, "load the draft's weights")
    return StepRunner(
        loaded.decoder,
        kernels,
        provider,
        model_id=found.model_id,
        fingerprint=loaded.fingerprint_with(draft),
        draft=draft.decoder if draft is not None else None,
        grammars=grammars,
        kv_dtype=kv_dtype,
    )


def _load(
    files: ModelFiles,
    settings: WorkerSettings,
    kernels: CpuKernels,
    progress: Progress,
    stage: str,
) -> LoadedModel:
    int8 = settings.quantization == "int8"
    loaded = load_model(
        files.directory,
        files.weights,
        settings.dtype,
        kernels,
        lambda done, total: progress(stage, done, total),
        Parts(settings.quantization, Int8Linear if int8 else Linear),
    )
    # Otherwise the first request would wait for the compiler.
    kernels.warm_up(
        loaded.decoder.config,
        loaded.decoder.dtype,
        lambda done, total: progress("compile kernels", done, total),
        int8=int8,
    )
    return loaded
