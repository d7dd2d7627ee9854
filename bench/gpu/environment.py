"""The Python environment of a pack: its wheels in a new virtual environment, and the packed sources.

Uses only the standard library, as it runs first on a machine that has nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FACTS = "pack.json"
WHEELS = "wheels"
SOURCE = "source"
MODELS = "models"


class PackError(Exception):
    """The pack cannot be created, or does not suit this machine; the message says what to do."""


def facts_of(pack: Path) -> dict[str, Any]:
    """Return the pack's description. Raises PackError."""
    try:
        facts: dict[str, Any] = json.loads((pack / FACTS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PackError(f"{pack} is no pack; `python -m bench.gpu pack {pack}` makes one") from None
    return facts


def make_environment(pack: Path, folder: Path) -> Path:
    """Install the wheels into a virtual environment in `folder`; return its Python. Raises PackError."""
    asked, here = facts_of(pack)["python"], f"{sys.version_info.major}.{sys.version_info.minor}"
    if asked != here:
        raise PackError(
            f"the wheels are for Python {asked}, and this is {here}: run this with python{asked}, or pack "
            f"again with `--python {here}`"
        )
    python = folder / "bin" / "python"
    # Without pip, in case this Python lacks `ensurepip`; its own pip installs the wheels.
    _call([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    wheels = sorted(map(str, (pack / WHEELS).glob("*.whl")))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    _call([*pip, "install", "--quiet", "--no-index", "--no-deps", "--no-compile", *wheels])
    return python


def environment_of(pack: Path) -> dict[str, str]:
    """Return environment variables that make an interpreter import the packed sources."""
    kept: Mapping[str, str] = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "PYTHONPATH": str((pack / SOURCE).resolve())}


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PackError(f"`{' '.join(command[:5])} ...` failed: {done.stderr.strip() or done.stdout.strip()}")
