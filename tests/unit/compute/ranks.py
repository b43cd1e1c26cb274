"""One rank of a model that several processes compute together."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import torch

from compute.fakes import Generated, PrivatePool, SimpleDriver
from compute.kernels.cpu import CpuKernels
from compute.layer import Parts
from compute.loading import load_model
from compute.parallel import Alone, Group, ProcessGroup
from compute.runner import StepRunner
from compute.types import SamplingOptions

Prompts = dict[str, list[int]]


def generate(
    directory: Path, prompts: Prompts, num_tokens: int, group: Group
) -> tuple[dict[str, Generated], tuple[int, ...]]:
    """What a rank draws, and the shape of its pool."""
    kernels, pool = CpuKernels(), PrivatePool(num_blocks=64, block_size=16)
    try:
        loaded = load_model(directory, directory, "float32", kernels, parts=Parts(group=group))
        runner = StepRunner(
            loaded.decoder, kernels, pool, model_id="tiny", fingerprint=loaded.fingerprint
        )
        drawing = SamplingOptions(temperature=1.0, seed=5, return_logprob=True)
        scored = SamplingOptions(return_logprob=True, return_prompt_logprobs=True)
        sampling = {name: drawing if n % 2 else scored for n, name in enumerate(prompts)}
        made = SimpleDriver(runner, token_budget=24).generate(prompts, num_tokens, sampling)
        shape = tuple(runner._pool.tensor.shape)
        runner.close()
        return made, shape
    finally:
        pool.close()


def _rank(rank, size, address, directory, prompts, num_tokens, answers) -> None:
    torch.set_num_threads(1)
    group = ProcessGroup(address, rank, size)
    answers.put((rank, generate(directory, prompts, num_tokens, group)))
    group.close()


def generate_in_ranks(directory: Path, prompts: Prompts, num_tokens: int, size: int) -> list:
    """What each of `size` processes draws."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    address = (directory / "meeting").as_uri()
    rest = (size, address, directory, prompts, num_tokens, answers)
    ranks = [context.Process(target=_rank, args=(rank, *rest)) for rank in range(size)]
    for process in ranks:
        process.start()
    try:
        return [made for _, made in sorted(answers.get(timeout=120) for _ in ranks)]
    finally:
        for process in ranks:
            process.join(10)
            process.kill()


def generate_alone(directory: Path, prompts: Prompts, num_tokens: int) -> tuple:
    return generate(directory, prompts, num_tokens, Alone())
