"""What the supervisor shows: progress while loading, prefixed logs, one line when ready."""

from __future__ import annotations

import json
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

_COLOURS = {"kvstore": "cyan", "compute": "magenta", "gateway": "green", "quire": "blue"}


class Screen:
    """Output for a person on a terminal, plain lines otherwise."""

    def __init__(self) -> None:
        # soft_wrap: a log line stays one line for whoever reads the stream.
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            console=self._console,
            transient=True,
        )
        self._bars: dict[str, TaskID] = {}
        self._seen: set[tuple[str, str]] = set()

    @property
    def is_terminal(self) -> bool:
        return self._console.is_terminal

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.clear()

    def progress(self, service: str, stage: str, done: int, total: int) -> None:
        if not self._console.is_terminal:
            if done < total and (service, stage) not in self._seen:
                self._seen.add((service, stage))
                self.log(service, f"{stage} …")
            return
        label = f"[{_COLOURS[service]}]{service}[/] {stage}"
        if service not in self._bars:
            self._bars[service] = self._progress.add_task(label, total=total)
        self._progress.update(self._bars[service], description=label, completed=done, total=total)

    def log(self, service: str, line: str) -> None:
        prefix = Text(f"{service:<7} │ ", style=_COLOURS[service])
        self._console.print(prefix + Text(line))

    def announce(self, http: str, grpc: str, model_id: str) -> None:
        self.clear()
        message = {"role": "user", "content": "What is the capital of France?"}
        body = json.dumps({"model": model_id, "messages": [message], "max_tokens": 64})
        self._console.print(
            f"[bold]Quire serves {model_id}[/] at http://{http}/v1 (gRPC {grpc}). Try: "
            f"curl http://{http}/v1/chat/completions -H 'content-type: application/json' "
            f"-d '{body}'"
        )

    def say(self, text: str) -> None:
        self._console.print(Text(f"quire: {text}"))

    def fail(self, text: str) -> None:
        self.clear()
        self._console.print(Text(f"quire: {text}", style="red"))

    def clear(self) -> None:
        """Take the progress bars away. Safe to repeat."""
        if self._console.is_terminal:
            self._progress.stop()
