"""The command that rebuilds an artefact."""

from __future__ import annotations

import shlex
from dataclasses import fields, replace
from pathlib import Path

from shortfin_apps.llm.model.spec import OWN_TYPES, BuildOptions

_FLAGS = {"device_block_count": "--pages"}  # other flags have the name of their option
_WEIGHTS = ("weights", "block_types")


def rebuild_command(directory: Path, source: str, options: BuildOptions) -> str:
    """Returns a `shortfin-llm build` command with the source and the options of `directory`'s build."""
    words = ["shortfin-llm", "build", source, "-o", str(directory), "--weights", _weights(options)]
    defaults = replace(BuildOptions.for_device(options.device), device=BuildOptions().device)
    for option in fields(BuildOptions):
        value = getattr(options, option.name)
        if value != getattr(defaults, option.name) and option.name not in _WEIGHTS:
            flag = _FLAGS.get(option.name, f"--{option.name.replace('_', '-')}")
            words += [flag] if value is True else [flag, _text(value)]
    return shlex.join(words)


def _weights(options: BuildOptions) -> str:
    return OWN_TYPES if options.block_types else options.weights


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return str(value)
