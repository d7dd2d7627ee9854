"""Reads the settings of a server from flags, environment variables and files.

Precedence: flags, then `SHORTFIN_LLM_*` variables, then the file of `--config` (YAML) or of upstream's
`--server_config` (JSON), then the defaults. Logging is set up from the settings, so warnings about the
settings are passed to the caller's `note`.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import TypeAdapter, ValidationError

from shortfin_apps.llm.serving.server.config import (
    EMPTY,
    ENV_PREFIX,
    KEYS,
    SWITCHES,
    ServerConfig,
    ServerConfigError,
    Source,
    called_in,
    flag,
    key_file,
)

logger = logging.getLogger(__name__)

Note = Callable[[str], None]  # receives one sentence about a setting that has no effect

# Upstream's names of settings, accepted as flags and in files, and the names here.
UPSTREAM_NAMES = {
    "prefix_sharing_algorithm": "prefix_cache",
    "server_config": "config",
}
# Upstream's settings without an equivalent here, and whether the flag takes a value.
UPSTREAM_IGNORED: dict[str, Literal["flag", "value"]] = {
    "program_isolation": "value",
    "chunk_block_size": "value",
    "num_beams": "value",
    "use_native_impls": "flag",
    "amdgpu_async_allocations": "flag",
    "amdgpu_async_caching": "flag",
    "amdgpu_allow_device_reuse": "flag",
    "amdgpu_allocators": "value",
    "decode_config": "value",
}

# Variables with the prefix that are not server settings: the directory of `build`'s cache.
OTHER_VARIABLES = frozenset({"CACHE"})
# Settings that name files containing secrets.
SECRET_FILES = ("ssl_keyfile", "receipt_key")
# Kubernetes sets NAME_PORT=tcp://ADDRESS:PORT and more in every pod, for every Service: a Service named
# `shortfin-llm` overwrites the variable of `--port`.
SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://\S+")
SERVICE_VARIABLE = re.compile(
    r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)


def load(flags: Mapping[str, Any], file: Source = EMPTY, note: Note = logger.warning) -> ServerConfig:
    """Merge settings: flags over environment over a file over defaults. Raises ServerConfigError."""
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for source in (file, _environment(note)):
        sources |= dict.fromkeys(source.values, source)
        values |= _expanded(source.values, sources)
    values |= _expanded(flags, {})
    sources = {name: source for name, source in sources.items() if name not in flags}
    config = ServerConfig.of(values, sources)
    for setting, reason in config.without_effect():
        note(f"`{setting}` has no effect: {reason}")
    key_and_certificates = () if config.http.ssl_keyfile is not None else ("ssl_certfile",)
    for name in (*SECRET_FILES, *key_and_certificates):
        if (path := config.given.get(name)) is not None:
            _note_exposed(path, note)
    for path in (key_file(key) for name in KEYS for key in config.given.get(name, ())):
        if path is not None:
            _note_exposed(path, note)
    return config


def _expanded(values: Mapping[str, Any], sources: Mapping[str, Source]) -> dict[str, Any]:
    """Replace each switch by its setting, in the values of one source. Raises ServerConfigError."""
    expanded = {name: value for name, value in values.items() if name not in SWITCHES}
    for name in SWITCHES.keys() & values.keys():
        setting, value = SWITCHES[name]
        try:
            is_on = TypeAdapter(bool).validate_python(values[name])
        except ValidationError:
            raise ServerConfigError(
                f"{called_in(sources, name)}: must be true or false, not {values[name]!r}"
            ) from None
        if is_on and setting in expanded:
            raise ServerConfigError(
                f"{called_in(sources, name)} stands for `{flag(setting)} {value}`, and `{flag(setting)} "
                f"{expanded[setting]}` was given, too; leave one of them out"
            )
        expanded |= {setting: value} if is_on else {}
    return expanded


def read_yaml(path: Path, note: Note = logger.warning) -> Source:
    """Return the settings in a YAML file; upstream's names are translated. Raises ServerConfigError."""
    try:
        raw = _Loader(path.read_text(encoding="utf-8")).get_single_data() or {}
    except OSError as error:
        raise ServerConfigError(f"{path}: cannot be read ({error.strerror}); check its path") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: an invalid date
        problem = _yaml_problem(error) if isinstance(error, yaml.MarkedYAMLError) else error
        raise ServerConfigError(f"{path}: not readable as YAML ({problem})") from None
    if not isinstance(raw, dict):
        raise ServerConfigError(f"{path}: must hold settings by name")
    if any(str(key).replace("-", "_") in KEYS for key in raw):
        _note_exposed(path, note)
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    for key, value in raw.items():
        plain = str(key).replace("-", "_")
        name = UPSTREAM_NAMES.get(plain, plain)
        if value is None and name not in KEYS:
            continue  # upstream writes null for an unset setting
        if name in UPSTREAM_IGNORED:
            note_ignored(name, value, note)
        elif name in values:
            raise ServerConfigError(f"{path}: sets `{name}` twice, as `{key}` too; keep one of them")
        else:
            values[name], written[name] = value, str(key)
    return Source(values=values, written=written, file=path)


class _Loader(yaml.SafeLoader):
    """A loader that refuses a repeated key, of which YAML's would silently drop all values but the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: list[object] = []
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.parser.ParserError(None, None, "a key is set twice", key.start_mark)
            seen.append(key.value)
        return super().construct_mapping(node, deep)


def _yaml_problem(error: yaml.MarkedYAMLError) -> str:
    """Describe a YAML error and its position, without quoting the file, which may contain keys."""
    is_syntax = isinstance(error, yaml.scanner.ScannerError | yaml.parser.ParserError)
    problem = error.problem if is_syntax else "an alias, a tag or a key that cannot be used"
    mark = error.problem_mark
    return f"{problem}, line {mark.line + 1}, column {mark.column + 1}" if mark else f"{problem}"


def _note_exposed(path: Path, note: Note) -> None:
    """Note if users other than the owner and the group can read or change a file of secrets."""
    try:
        mode = path.stat().st_mode
    except OSError:  # reading the secrets reports the reason
        return
    if stat.S_ISREG(mode) and mode & (stat.S_IROTH | stat.S_IWOTH):
        can = "change" if mode & stat.S_IWOTH else "read"
        note(
            f"{path} has a secret, and every user of this machine can {can} it; `chmod o= "
            f"{shlex.quote(str(path))}` ends that"
        )


def _environment(note: Note) -> Source:
    """Return the environment variables with ENV_PREFIX, except known ones that are not settings."""
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    for variable, value in os.environ.items():
        prefix, name = variable[: len(ENV_PREFIX)].upper(), variable[len(ENV_PREFIX) :].lower()
        if prefix != ENV_PREFIX or name.upper() in OTHER_VARIABLES:
            continue
        is_link = f"_{name}".endswith("_port") and SERVICE_LINK.fullmatch(value)
        if is_link and name == "port":
            note(
                f"the variable `{variable}` is {value!r}, which Kubernetes sets for a Service of that name, "
                "and is ignored; `enableServiceLinks: false` in the pod's spec keeps it away"
            )
        elif not (is_link or SERVICE_VARIABLE.fullmatch(name.upper())):
            values[name], written[name] = value, variable
    return Source(values=values, written=written, prefix=ENV_PREFIX)


def note_ignored(name: str, value: object, note: Note) -> None:
    """Note that an upstream setting is ignored; for `decode_config`, note each setting in it."""
    inner = [f"{name}.{key}" for key in value] if isinstance(value, Mapping) else [name]
    for each in inner:
        own = each.rpartition(".")[2]
        instead = f"; set `{own}` at the top level instead" if own in ServerConfig.SETTINGS else ""
        note(f"upstream's setting `{each}` has no effect here{instead}")
