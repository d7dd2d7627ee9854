"""Command line of an engine's server."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Arguments:
    """`precision` None leaves the activations' type to the engine."""

    model: Path
    port: int
    threads: int
    precision: str | None


def parse_arguments(about: str | None, argv: Sequence[str] | None = None) -> Arguments:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("model", type=Path, help="directory that the engine's converter wrote")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--precision", help="of activations, as bf16 (default: the engine's choice)")
    found = parser.parse_args(argv)
    return Arguments(found.model, found.port, found.threads, found.precision)
