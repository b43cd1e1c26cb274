"""`quire fetch-model`: have a model's files ready before they are needed."""

from __future__ import annotations

from services.common import config, model_files


def main(arguments: list[str]) -> int:
    settings = config.load(config.ModelSettings, "fetch-model", arguments)
    found = model_files.find(settings.model, settings.cache_dir, _print_stage)
    print(f"{found.model_id}: {found.weights}")
    return 0


def _print_stage(stage: str, done: int, _total: int) -> None:
    if done == 0:
        print(f"{stage} …", flush=True)
