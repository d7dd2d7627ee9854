"""Parses and formats sampling parameters typed by a user: `temperature=0.2 seed=7`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any, cast, get_type_hints

from shortfin_apps.llm.client import Sampling
from shortfin_apps.llm.contract.errors import InvalidRequestError

_TYPES: Mapping[str, Any] = get_type_hints(Sampling)


def changed(sampling: Sampling, text: str) -> Sampling:
    """Apply changes from a text: `name=value` sets a parameter, `name=` restores the server's default.

    Values are JSON, or text if the type allows it. Raises InvalidRequestError for an invalid name or value.
    """
    values = dict(sampling)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InvalidRequestError(f"the parameters have an open quotation ({error})") from None
    for word in words:
        name, equals, value = word.partition("=")
        name = name.replace("-", "_")
        if not equals:
            raise InvalidRequestError(f"{word!r} has no value; write {word}=VALUE", name)
        if name not in _TYPES:
            raise InvalidRequestError(f"there is no parameter {name}; there are {', '.join(_TYPES)}", name)
        if value:
            values[name] = _parsed(name, value)
        else:
            values.pop(name, None)
    return cast(Sampling, values)


def shown(sampling: Sampling) -> str:
    """Format the parameters in the syntax of `changed`."""
    if not sampling:
        return "(no parameters are set; the server has defaults)"
    return " ".join(f"{name}={shlex.quote(_text(value))}" for name, value in sampling.items())


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _parsed(name: str, text: str) -> object:
    """Return the JSON value if it has the parameter's type, or else the text if a string is allowed."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError  # slow to import and rarely needed

    # Strict: JSON's `true` is not accepted as a number, and neither is NaN.
    adapter = TypeAdapter(_TYPES[name], config=ConfigDict(strict=True, allow_inf_nan=False))
    reason = ""
    for value in (_json(text), text):
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            reason = reason or error.errors()[0]["msg"]
    raise InvalidRequestError(f"{name} cannot be {text!r}: {reason}", name)


def _json(text: str) -> object:
    """Parse JSON; return any other text unchanged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
