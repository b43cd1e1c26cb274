"""A step runner on this machine's CPU, from settings."""

from __future__ import annotations

import os

from compute import threads
from compute.kernels.cpu import CpuKernels
from compute.loading import load_model
from compute.ports import PoolProvider
from compute.runner import StepRunner
from services.common import model_files
from services.common.config import WorkerSettings
from services.common.model_files import Progress


def load(settings: WorkerSettings, provider: PoolProvider, progress: Progress) -> StepRunner:
    """Load the model, compile the kernels and attach the pool.

    Blocks for seconds. Raises StartupError and what load_model and StepRunner raise.
    """
    threads.configure(settings.threads or len(os.sched_getaffinity(0)))
    found = model_files.find(settings.model, settings.cache_dir, progress)
    kernels = CpuKernels()
    loaded = load_model(
        found.directory,
        found.weights,
        settings.dtype,
        kernels,
        lambda done, total: progress("load weights", done, total),
    )
    # Otherwise the first request would wait for the compiler.
    kernels.warm_up(
        loaded.decoder.config,
        loaded.decoder.dtype,
        lambda done, total: progress("compile kernels", done, total),
    )
    return StepRunner(
        loaded.decoder,
        kernels,
        provider,
        model_id=found.model_id,
        fingerprint=loaded.fingerprint,
    )
