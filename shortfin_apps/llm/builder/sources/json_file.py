"""Read the files of a model directory; all imports are fast, for quick checks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shortfin_apps.llm.builder.sources.metadata_limits import MAX_JSON_BYTES, check_at_most
from shortfin_apps.llm.contract.errors import BuildError


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """Return the JSON object in `path`; empty if it is `optional` and missing. Raises BuildError."""
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise BuildError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise BuildError(f"{path}: must hold a JSON object")
    return value


def read_text(path: Path) -> str:
    """Return the text in `path`. Raises BuildError, also for a file that is too large to be metadata."""
    try:
        check_at_most(str(path), "has {} bytes", path.stat().st_size, MAX_JSON_BYTES)
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BuildError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BuildError(f"{path}: cannot be read ({error})") from error
