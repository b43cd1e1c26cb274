"""Structured answers: a JSON schema, a regular expression, texts to choose from or a
grammar, into the form that compute's sampler takes, once it is known to work.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gateway.errors import InvalidField, QueueFull

MAX_BYTES = 256 * 1024
MAX_CHOICES = 1024
_MAX_ANSWER_BYTES = 8 * 2**20  # a line of the worker; escapes make a text longer
_MAX_CACHED = 64
_MAX_WAITING = 32  # grammars that wait for the process, each for up to its time limit
_MAX_ERROR = 400  # characters; the library quotes the grammar

_TOO_COMPLEX = "it is too complex to be compiled"


class StructureKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"  # GBNF, or Lark's dialect


@dataclass(frozen=True, slots=True)
class Structure:
    """What an answer must be. `field` is what its client calls it.

    `text` is the schema, the expression or the grammar; of a choice, a JSON list.
    """

    kind: StructureKind
    text: str
    field: str


def json_object(field: str) -> Structure:
    return Structure(StructureKind.JSON_SCHEMA, '{"type":"object"}', field)


def choice(texts: Sequence[str], field: str) -> Structure:
    """Raises InvalidField: none or too many texts, or an empty one."""
    if not 1 <= len(texts) <= MAX_CHOICES:
        raise InvalidField(field, f"{field}: must have 1 to {MAX_CHOICES} texts, not {len(texts)}")
    for index, text in enumerate(texts):
        if not text:
            raise InvalidField(f"{field}[{index}]", f"{field}[{index}]: it is empty")
    return Structure(StructureKind.CHOICE, json.dumps(list(texts), ensure_ascii=False), field)


class GrammarCompiler:
    """Compiles in a process of its own, one grammar at a time, and remembers the latest.

    A grammar that takes the process down or too long is refused like any that is
    wrong, and the next one gets a new process. The first one starts when it is needed.
    """

    def __init__(
        self,
        tokenizer_file: Path,
        vocab_size: int,
        eos_ids: Iterable[int],
        *,
        time_limit: float = 5.0,
        start_limit: float = 30.0,
    ) -> None:
        """Limits in seconds: for one grammar, and for the process to read the tokenizer."""
        self._arguments = [str(tokenizer_file), str(vocab_size), *map(str, sorted(eos_ids))]
        self._has_eos = len(self._arguments) > 2
        self._time_limit = time_limit
        self._start_limit = start_limit
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        # By digest, the latest at the end; each gives a grammar, or why there is none.
        self._known: OrderedDict[bytes, asyncio.Task[tuple[str, str]]] = OrderedDict()

    async def compile(self, structure: Structure) -> str:
        """The grammar for `SamplingOptions.grammar`.

        Raises:
            InvalidField: it is too large, does not compile, or nothing satisfies it;
                UNSUPPORTED_OPTION if the model has no end-of-sequence token.
            QueueFull: many others are being compiled.
        """
        field = structure.field
        if not self._has_eos:
            text = f"{field}: the model has no end-of-sequence token"
            raise InvalidField(field, text, reason="UNSUPPORTED_OPTION")
        encoded = structure.text.encode("utf-8", "replace")
        if not 1 <= len(encoded) <= MAX_BYTES:
            raise InvalidField(field, f"{field}: must have 1 to {MAX_BYTES} bytes in UTF-8")
        task = self._task_of(structure, encoded)
        # Others may wait for the same; and an exchange that is cut short spoils the next.
        grammar, obstacle = await asyncio.shield(task)
        if obstacle:
            shown = obstacle if len(obstacle) <= _MAX_ERROR else obstacle[:_MAX_ERROR] + "…"
            raise InvalidField(field, f"{field}: {shown}")
        return grammar

    def _task_of(self, structure: Structure, encoded: bytes) -> asyncio.Task[tuple[str, str]]:
        key = hashlib.sha256(f"{structure.kind}:".encode() + encoded).digest()
        task = self._known.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            if sum(not known.done() for known in self._known.values()) >= _MAX_WAITING:
                raise QueueFull(limit=_MAX_WAITING, retry_after=self._time_limit)
            request = json.dumps({"kind": structure.kind, "text": structure.text})
            task = asyncio.create_task(self._compile(request.encode() + b"\n"))
            self._known[key] = task
        self._known.move_to_end(key)
        while len(self._known) > _MAX_CACHED:
            self._known.popitem(last=False)
        return task

    async def _compile(self, request: bytes) -> tuple[str, str]:
        async with self._turn:
            process = await self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                async with asyncio.timeout(self._time_limit):
                    process.stdin.write(request)
                    await process.stdin.drain()
                    line = await process.stdout.readline()
            except TimeoutError:
                await self.close()
                return "", f"it was not compiled within {self._time_limit:g} s"
            except (OSError, ValueError):  # it died, or its answer is far too long
                line = b""
            if not line:
                await self.close()
                return "", _TOO_COMPLEX
        answer = json.loads(line)
        return answer.get("grammar", ""), answer.get("error", "")

    async def _running(self) -> asyncio.subprocess.Process:
        """The process, once it is up: reading the tokenizer is no grammar's fault."""
        if self._process is None:
            # By its path and isolated: beside it are modules with names of the library's.
            program = Path(__file__).with_name("grammar_worker.py")
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                str(program),
                *self._arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                limit=_MAX_ANSWER_BYTES,
            )
            assert self._process.stdout is not None
            async with asyncio.timeout(self._start_limit):
                await self._process.stdout.readline()
        return self._process

    async def close(self) -> None:
        """End the process. The next grammar starts another."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()
