"""API keys: the ones given as settings and the ones in a file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pydantic import SecretStr

from shortfin_apps.llm.server.config import ServerConfigError

KEY = re.compile(r"(?!,+$)[\x21-\x7e]+")  # commas alone are an empty list


def read_keys(given: Sequence[SecretStr], path: Path | None) -> list[str]:
    """The keys that were given, then those in the file, one a line; empty lines and lines with # are skipped.

    Raises ServerConfigError, whose message never contains a key.
    """
    keys = [key.get_secret_value() for key in given]
    if path is not None:
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ServerConfigError(f"{path}: cannot be read as a file of keys ({error})") from error
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise ServerConfigError(f"{path}: holds no key; write one a line")
        keys += found
    if not all(KEY.fullmatch(key) for key in keys):
        raise ServerConfigError("a key must be made of visible ASCII characters, without spaces")
    return keys
