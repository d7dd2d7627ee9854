"""The command that builds an artefact again."""

from __future__ import annotations

import shlex
from dataclasses import fields
from pathlib import Path

from shortfin_apps.llm.builder.model.spec import BuildOptions

_FLAGS = {"device_block_count": "--pages"}  # others are named as their option


def rebuild_command(directory: Path, source: str, options: BuildOptions) -> str:
    """`shortfin-llm build`, with the source and the options that `directory` was built with."""
    words = ["shortfin-llm", "build", source, "-o", str(directory)]
    for option in fields(BuildOptions):
        value = getattr(options, option.name)
        if value != option.default:
            words += [_FLAGS.get(option.name, f"--{option.name.replace('_', '-')}"), _text(value)]
    return shlex.join(words)


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return str(value)
