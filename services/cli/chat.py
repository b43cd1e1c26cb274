"""`quire chat`: a conversation in the terminal, over the REST interface."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Iterator
from contextlib import closing
from types import TracebackType
from typing import Any

import httpx
from rich.console import Console
from rich.text import Text

from services.cli.printable import printable
from services.common import config
from services.common.startup import StartupError

HELP = (
    "/reset: start over   /system TEXT: new system prompt   /exit or Ctrl-D: leave   Ctrl-C: stop"
)

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
# An answer may wait in a queue for long; only the connection itself must come soon.
_TIMEOUT = httpx.Timeout(None, connect=5.0)


class ChatError(Exception):
    """The server refused, or went away. The text is one line."""


class Conversation:
    """Messages so far, and a server that continues them.

    `history` only ever holds pairs of a question and its answer, whole or as far as
    it came; `system` is the system prompt, empty for none.
    """

    def __init__(self, settings: config.ChatSettings) -> None:
        """Raises StartupError if nobody answers, or the model is not served."""
        url = settings.url.rstrip("/").removesuffix("/v1")
        try:
            # A proxy that the environment names does not know this machine's servers.
            trust_env = httpx.URL(url).host not in _LOOPBACK
            self._http = httpx.Client(base_url=url, timeout=_TIMEOUT, trust_env=trust_env)
            served = self._http.get("/v1/models").raise_for_status().json()["data"]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as error:
            raise StartupError(
                f"no Quire answers at {settings.url} ({error}); start one with `quire up`"
            ) from None
        names = [model["id"] for model in served]
        if settings.model and settings.model not in names:
            raise StartupError(f"model {settings.model!r} is not served, but {', '.join(names)}")
        self.model = settings.model or names[0]
        self._options = {
            "model": self.model,
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
            "stream": True,
        }
        self.history: list[dict[str, str]] = []
        self.system = settings.system

    def reset(self) -> None:
        """Forget all but the system prompt."""
        self.history = []

    def ask(self, text: str) -> Generator[str]:
        """Pieces of the answer. Closing the iterator stops the answer.

        Raises:
            ChatError: the history is as before, unless part of the answer came.
        """
        question = {"role": "user", "content": text}
        answer = ""
        try:
            for piece in self._stream([*self._preamble(), *self.history, question]):
                answer += piece
                yield piece
        except httpx.HTTPError as error:
            raise ChatError(f"the connection failed: {error or type(error).__name__}") from None
        finally:
            if answer:
                self.history += [question, {"role": "assistant", "content": answer}]

    def _preamble(self) -> list[dict[str, str]]:
        return [{"role": "system", "content": self.system}] if self.system else []

    def _stream(self, messages: list[dict[str, str]]) -> Iterator[str]:
        body = self._options | {"messages": messages}
        with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.is_error:
                raise ChatError(_error_text(response.read()))
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield _piece(json.loads(line.removeprefix("data: ")))

    def __enter__(self) -> Conversation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._http.close()


def _piece(chunk: dict[str, Any]) -> str:
    if "error" in chunk:
        raise ChatError(chunk["error"]["message"])
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


def _error_text(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {body[:200]!r}"


class Terminal:
    """Reads questions and commands, shows answers."""

    def __init__(self, conversation: Conversation, console: Console) -> None:
        self._conversation = conversation
        self._console = console
        self._prompt = "› " if sys.stdin.isatty() else ""

    def run(self) -> None:
        """Until /exit or the end of input."""
        self._note(f"{self._conversation.model}   {HELP}")
        while True:
            try:
                line = input(self._prompt).strip()
            except EOFError:
                self._console.print()
                return
            except KeyboardInterrupt:
                self._console.print()
                continue
            if line == "/exit":
                return
            if line.startswith("/"):
                self._command(*line.split(maxsplit=1))
            elif line:
                self._answer(line)

    def _command(self, name: str, argument: str = "") -> None:
        if name == "/reset":
            self._conversation.reset()
            self._note("The conversation starts over.")
        elif name == "/system":
            self._conversation.system = argument
            self._conversation.reset()
            self._note("The conversation starts over with this system prompt.")
        else:
            self._note(HELP)

    def _answer(self, question: str) -> None:
        try:
            with closing(self._conversation.ask(question)) as pieces:
                for piece in pieces:
                    self._console.print(Text(printable(piece)), end="", soft_wrap=True)
        except KeyboardInterrupt:
            self._console.print(Text(" [stopped]", style="dim"), end="")
        except ChatError as error:
            self._console.print(Text(f"[{printable(str(error))}]", style="red"), end="")
        self._console.print()

    def _note(self, text: str) -> None:
        self._console.print(Text(text, style="dim"))


def main(arguments: list[str]) -> int:
    settings = config.load(config.ChatSettings, "chat", arguments)
    if sys.stdin.isatty():
        import readline  # noqa: F401 - editing and history for input()
    with Conversation(settings) as conversation:
        Terminal(conversation, Console(highlight=False)).run()
    return 0
