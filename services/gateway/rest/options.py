"""Options of OpenAI's API that are not built.

Each is accepted with the values that would change nothing, and refused with any
other: an option that is ignored gives a wrong answer without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.errors import InvalidField

Inert = Callable[[object], bool]


def _one_of(*values: object) -> Inert:
    # By type as well, since 1 == True == 1.0.
    return lambda given: any(type(given) is type(value) and given == value for value in values)


def _text(given: object) -> bool:
    return given is None or isinstance(given, str)


_NULL = _one_of(None)

COMMON: Mapping[str, Inert] = {
    "store": _one_of(None, False),
}

COMPLETION: Mapping[str, Inert] = {
    **COMMON,
    "suffix": _one_of(None, ""),
}

# Without tools, how they may be called changes nothing. Cache keys and identifiers are
# hints to the provider that never change an answer.
CHAT: Mapping[str, Inert] = {
    **COMMON,
    "tools": _one_of(None, []),
    "tool_choice": _one_of(None, "none", "auto"),
    "parallel_tool_calls": _one_of(None, True, False),
    "functions": _one_of(None, []),
    "function_call": _one_of(None, "none", "auto"),
    "modalities": _one_of(None, ["text"]),
    "audio": _NULL,
    "prediction": _NULL,
    "moderation": _NULL,
    "web_search_options": _NULL,
    "reasoning_effort": _one_of(None, "none"),
    "verbosity": _one_of(None, "medium"),
    "service_tier": _one_of(None, "auto", "default"),
    "prompt_cache_key": _text,
    "prompt_cache_options": _NULL,
    "prompt_cache_retention": _NULL,
    "safety_identifier": _text,
}

# What clients send along when they repeat an answer they were given.
MESSAGE: Mapping[str, Inert] = {
    "name": _NULL,
    "refusal": _NULL,
    "audio": _NULL,
    "annotations": _one_of(None, []),
    "tool_calls": _one_of(None, []),
    "function_call": _NULL,
}

STREAM: Mapping[str, Inert] = {"include_obfuscation": _one_of(None, False)}


def unsupported(field: str, what: str) -> InvalidField:
    return InvalidField(field, f"{field}: {what}", reason="UNSUPPORTED_OPTION")


def without_inert(
    fields: Mapping[str, object], table: Mapping[str, Inert], path: str = ""
) -> dict[str, object]:
    """`fields` without the options of `table`, each of which must have an inert value.

    Raises:
        InvalidField: UNSUPPORTED_OPTION, with the option under `path`.
    """
    for name in fields.keys() & table.keys():
        if not table[name](fields[name]):
            raise unsupported(path + name, "this value is not supported")
    return {name: value for name, value in fields.items() if name not in table}
