"""The files of a GGUF model that llama.cpp's llama-gguf-split split into parts."""

from __future__ import annotations

import re
from pathlib import Path

from shortfin_apps.llm.contract.errors import BuildError

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")


def parts_of(path: Path) -> list[Path]:
    """Return all files of the model that `path` belongs to; the first has its metadata. Raises BuildError."""
    match = _PART.fullmatch(path.stem)
    if match is None:
        return [path]
    count = int(match["count"])
    names = [f"{match['stem']}-{number + 1:05}-of-{count:05}{path.suffix}" for number in range(count)]
    parts = [path.with_name(name) for name in names]
    if path not in parts:
        raise BuildError(f"{path}: is none of its {count} parts")
    if missing := [part for part in parts if not part.exists()]:
        raise BuildError(f"{missing[0]}: no such file; {path.name} is one of {count} parts")
    return parts


def whole_stem(stem: str) -> str:
    """Return a file's name without its extension and part number."""
    match = _PART.fullmatch(stem)
    return match["stem"] if match else stem
