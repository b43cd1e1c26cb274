"""Values against a model, with errors in the words of JSON."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from gateway.errors import InvalidField

M = TypeVar("M", bound=BaseModel)

# Where the library's own words speak of Python.
_TEXTS = {
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "too_long": "may have {max_length} entries at most",
    "too_short": "must have {min_length} entries at least",
    "string_too_short": "must not be empty",
}


def checked(kind: type[M], value: object, path: str = "") -> M:
    """Raises InvalidField for the first field that is wrong, with its name under `path`."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    field = path + "".join(_step(part) for part in first["loc"]).removeprefix(".")
    field = field.removesuffix(".")
    if first["type"] == "extra_forbidden":
        raise InvalidField(field, f"{field}: unknown field", reason="UNKNOWN_FIELD")
    text = _TEXTS.get(first["type"], first["msg"]).format(**first.get("ctx", {}))
    raise InvalidField(field, f"{field}: {text[0].lower()}{text[1:]}")


def _step(part: int | str) -> str:
    return f"[{part}]" if isinstance(part, int) else f".{part}"
