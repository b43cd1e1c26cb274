"""`quire pool`: what is in a running kvstore's pool, once or each second."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from typing import Any, NoReturn

from google.protobuf.json_format import MessageToDict
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from services.cli.kvstore_client import KvStoreClient, KvStoreSilent
from services.cli.pool_screen import MOST_ROWS, PoolView, render
from services.common import config

_PERIOD_SECONDS = 1.0


def main(arguments: list[str]) -> int:
    settings = config.load(config.PoolViewSettings, "pool", arguments)
    console = Console(highlight=False)
    with KvStoreClient(settings.kvstore) as kvstore:
        view = _look(kvstore)  # the first time, silence is an error
        if not settings.watch:
            _print(view, console, as_json=settings.as_json)
            return 0
        with contextlib.suppress(KeyboardInterrupt):
            if settings.as_json or not console.is_terminal:
                _print_each(kvstore, view, console, as_json=settings.as_json)
            _watch(kvstore, view, console)
    return 0


def _look(kvstore: KvStoreClient) -> PoolView:
    stats, pins = kvstore.stats(), kvstore.pins()
    return PoolView(kvstore.address, stats, pins, kvstore.sequences(MOST_ROWS))


def _print(view: PoolView, console: Console, *, as_json: bool) -> None:
    if as_json:
        print(_as_json(view), flush=True)
    else:
        console.print(render(view))


def _print_each(
    kvstore: KvStoreClient, view: PoolView, console: Console, *, as_json: bool
) -> NoReturn:
    """One after the other, until the kvstore is silent."""
    while True:
        _print(view, console, as_json=as_json)
        time.sleep(_PERIOD_SECONDS)
        view = _look(kvstore)


def _watch(kvstore: KvStoreClient, view: PoolView, console: Console) -> NoReturn:
    """In one place of the terminal. A kvstore that is silent may come back."""
    trouble = ""
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(Group(render(view), Text(f"\n{trouble}", "red")), refresh=True)
            time.sleep(_PERIOD_SECONDS)
            try:
                view, trouble = _look(kvstore), ""
            except KvStoreSilent as error:
                trouble = str(error)


def _as_json(view: PoolView) -> str:
    lists: dict[str, Any] = {
        name: [MessageToDict(one, preserving_proto_field_name=True) for one in messages]
        for name, messages in (("pins", view.pins), ("sequences", view.sequences))
    }
    stats = dataclasses.asdict(view.stats)
    return json.dumps({"kvstore": view.address, "stats": stats, **lists})
