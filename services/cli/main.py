"""Commands of `quire` and the way to each."""

from __future__ import annotations

import sys
from collections.abc import Callable

# Commands import what they run only when they run it: torch alone costs seconds. And an
# interrupt while something is imported should end it without a traceback, too.


def _up(arguments: list[str]) -> int:
    from services.cli import up

    return up.main(arguments)


def _serve_kvstore(arguments: list[str]) -> int:
    from services.kvstore import __main__ as kvstore

    return kvstore.main(arguments)


def _serve_compute(arguments: list[str]) -> int:
    from services.compute import __main__ as compute

    return compute.main(arguments)


def _serve_gateway(arguments: list[str]) -> int:
    from services.gateway import __main__ as gateway

    return gateway.main(arguments)


def _chat(arguments: list[str]) -> int:
    from services.cli import chat

    return chat.main(arguments)


def _pool(arguments: list[str]) -> int:
    from services.cli import pool

    return pool.main(arguments)


def _fsck(arguments: list[str]) -> int:
    from services.cli import fsck

    return fsck.main(arguments)


def _fetch_model(arguments: list[str]) -> int:
    from services.cli import fetch

    return fetch.main(arguments)


def _config(arguments: list[str]) -> int:
    from services.common import config

    print(config.to_toml(config.load(config.UpSettings, "config", arguments)))
    return 0


_COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "up": (_up, "start all three services and serve a model"),
    "chat": (_chat, "talk to a running Quire in the terminal"),
    "pool": (_pool, "show what is in the page pool"),
    "fsck": (_fsck, "check the page pool, and repair it if asked to"),
    "serve-kvstore": (_serve_kvstore, "start the KV page manager alone"),
    "serve-compute": (_serve_compute, "start a compute worker alone"),
    "serve-gateway": (_serve_gateway, "start the gateway alone"),
    "config": (_config, "print the configuration that `up` would use"),
    "fetch-model": (_fetch_model, "fetch and prepare a model, then exit"),
}


def _usage() -> str:
    width = max(map(len, _COMMANDS))
    rows = [f"  {name:<{width}}  {text}" for name, (_, text) in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: quire COMMAND [--OPTION VALUE ...]",
            "",
            *rows,
            "",
            "quire COMMAND --help: options",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status is 0, 1 (it failed), 2 (misuse) or 130 (interrupted)."""
    words = sys.argv[1:] if arguments is None else arguments
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if words else 2
    if words[0] not in _COMMANDS:
        print(f"quire: no command {words[0]!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    try:
        return _run(_COMMANDS[words[0]][0], words[1:])
    except KeyboardInterrupt:
        return 130


def _run(command: Callable[[list[str]], int], arguments: list[str]) -> int:
    from services.common.config import ConfigError, doubtful_variables
    from services.common.startup import StartupError

    for sentence in doubtful_variables():
        print(f"quire: {sentence}", file=sys.stderr)
    try:
        return command(arguments)
    except StartupError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
