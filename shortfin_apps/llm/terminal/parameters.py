"""Sampling parameters as they are typed: `temperature=0.2 seed=7`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any, cast, get_type_hints

from shortfin_apps.llm.client import Sampling
from shortfin_apps.llm.errors import InvalidRequestError

_TYPES: Mapping[str, Any] = get_type_hints(Sampling)


def changed(sampling: Sampling, text: str) -> Sampling:
    """The parameters with those of the text: `name=value` sets one, `name=` leaves it to the server.

    Values are JSON, or text where that is allowed. Raises InvalidRequestError for a wrong name or value.
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
    """The parameters as `changed` takes them."""
    if not sampling:
        return "(no parameters are set; the server has defaults)"
    return " ".join(f"{name}={shlex.quote(_text(value))}" for name, value in sampling.items())


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _parsed(name: str, text: str) -> object:
    """The value of JSON that has the parameter's type, or the text itself if that has it."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError  # slow to import, and few ask for it

    # Of any integer or number, JSON's `true` is none, nor is NaN a number.
    adapter = TypeAdapter(_TYPES[name], config=ConfigDict(strict=True, allow_inf_nan=False))
    reason = ""
    for value in (_json(text), text):
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            reason = reason or error.errors()[0]["msg"]
    raise InvalidRequestError(f"{name} cannot be {text!r}: {reason}", name)


def _json(text: str) -> object:
    """The value of JSON text, or other text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
