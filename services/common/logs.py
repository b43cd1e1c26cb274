"""Structured logs: one event a line, keys the same in all three services."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog

LogFormat = Literal["text", "json"]


def configure(level: str, log_format: LogFormat, service: str) -> None:
    """Send this process's logs to stderr. `service` is added to every JSON line."""
    numeric = logging.getLevelNamesMapping()[level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True)
        if log_format == "json"
        else structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
        structlog.processors.format_exc_info,
    ]
    renderer: structlog.typing.Processor
    if log_format == "json":
        shared.append(_service_adder(service))
        renderer = structlog.processors.JSONRenderer()
    else:
        renderer = _text_line
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(numeric),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    _route_standard_logging(numeric, shared, renderer)


def _text_line(_logger: object, _method: str, event: structlog.typing.EventDict) -> str:
    """For people: time, level, what happened, and the rest as key=value."""
    facts = dict(event)
    parts = [facts.pop("timestamp"), f"{facts.pop('level'):<7}", str(facts.pop("event"))]
    trace = facts.pop("exception", None)
    parts += [f"{key}={_plain(value)}" for key, value in facts.items()]
    return " ".join(parts) + (f"\n{trace}" if trace else "")


def _plain(value: object) -> str:
    text = str(value)
    return text if text and text.isprintable() and " " not in text else repr(text)


def _service_adder(service: str) -> structlog.typing.Processor:
    def add(
        _logger: object, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        event["service"] = service
        return event

    return add


def _route_standard_logging(
    level: int, shared: list[structlog.typing.Processor], renderer: structlog.typing.Processor
) -> None:
    """Libraries that use `logging` come out in the same form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(level, logging.WARNING))  # theirs only when something is wrong
    for domain in ("gateway", "kvstore", "compute"):
        logging.getLogger(domain).setLevel(level)
