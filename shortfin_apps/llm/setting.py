"""Declares settings: fields of frozen dataclasses, one dataclass per subject.

Each field made by `setting` gets a flag, an environment variable, a YAML key and a line in `--help`. They are
derived from the field's name, type, default and help. Code that uses settings gets the dataclass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any, get_type_hints

_KEY = "setting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting. `type` is the field's annotation; `checks` are arguments for pydantic's `Field`.

    `read`, if given, converts a value from a flag, a variable or YAML before the type is checked, and may
    raise ValueError. `--help` shows only `is_common` settings, `--help-all` shows all.
    """

    help: str
    is_common: bool
    checks: dict[str, Any]
    read: Callable[[Any], Any] | None
    name: str = ""
    type: Any = None
    default: Any = None


def setting(
    default: Any, help: str, *, common: bool = False, read: Callable[[Any], Any] | None = None, **checks: Any
) -> Any:
    """Return a dataclass field that is a setting. `default` is a value, or a callable that creates one."""
    metadata = {_KEY: Setting(help=help, is_common=common, checks=checks, read=read)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def settings_of(subject: type) -> Iterator[Setting]:
    """Yield the settings of a dataclass and of its fields that are dataclasses, in order."""
    hints = get_type_hints(subject, include_extras=True)
    for each in fields(subject):
        if _KEY in each.metadata:
            found: Setting = each.metadata[_KEY]
            yield Setting(
                help=found.help,
                is_common=found.is_common,
                checks=found.checks,
                read=found.read,
                name=each.name,
                type=hints[each.name],
                default=_default(each),
            )
        elif is_dataclass(hints[each.name]):
            yield from settings_of(hints[each.name])


def make(subject: type, values: dict[str, Any]) -> Any:
    """Create an instance of a dataclass, with nested dataclasses, from setting values by name.

    Settings that are not in `values` keep their defaults.
    """
    hints = get_type_hints(subject)
    arguments = {}
    for each in fields(subject):
        if _KEY not in each.metadata and is_dataclass(hints[each.name]):
            arguments[each.name] = make(hints[each.name], values)
        elif _KEY in each.metadata and each.name in values:
            arguments[each.name] = values[each.name]
    return subject(**arguments)


def shown(subject: Any) -> dict[str, Any]:
    """Return the values of a dataclass's settings by name, including nested dataclasses."""
    values: dict[str, Any] = {}
    for each in fields(subject):
        value = getattr(subject, each.name)
        if _KEY in each.metadata:
            values[each.name] = value
        elif is_dataclass(value):
            values |= shown(value)
    return values


def _default(of: Field[Any]) -> Any:
    return of.default_factory() if of.default_factory is not MISSING else of.default
