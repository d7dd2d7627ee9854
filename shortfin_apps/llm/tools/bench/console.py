"""Argument types, tables and progress bars shared by the benchmark commands."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shortfin_apps.llm.console import PlainConsole
from shortfin_apps.llm.contract.errors import InvalidRequestError

TABLE_WIDTH = 180  # columns, if stdout is not a terminal


def progress_bar(unit: str) -> Progress:
    """Create a progress bar on stderr, hidden unless stderr is a terminal; `unit` is what it counts."""
    # Only two frames per second, as drawing takes CPU time from a measured server on the same machine.
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        console=PlainConsole(stderr=True),
        refresh_per_second=2,
        transient=True,
        disable=not sys.stderr.isatty(),
    )


def table_console() -> PlainConsole:
    """Create a console on stdout, with TABLE_WIDTH columns if stdout is not a terminal."""
    return PlainConsole(width=None if sys.stdout.isatty() else TABLE_WIDTH)


def write_json(doc: dict[str, Any], destination: str) -> None:
    """Write `doc` as JSON to a file, or to stdout for `-`. Raises InvalidRequestError if writing fails."""
    text = json.dumps(doc, indent=2)
    if destination == "-":
        print(text)
        return
    try:
        Path(destination).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"cannot write {destination}: {error.strerror}", "json") from error


def show(doc: dict[str, Any], destination: str | None, print_tables: Callable[[PlainConsole], None]) -> None:
    """Write `doc` as JSON to `destination`, if given; print tables unless `destination` is `-` (stdout)."""
    if destination != "-":
        print_tables(table_console())
    if destination is not None:
        write_json(doc, destination)


def add_json(parser: argparse._ActionsContainer) -> None:
    """Add the option `--json`, whose value is the `destination` of `show`."""
    parser.add_argument(
        "--json", metavar="FILE", help="write the results as JSON; `-`: to stdout, without tables"
    )


def positive(text: str) -> int:
    """Parse a positive integer, as an argparse type."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def positives(text: str) -> list[int]:
    """Parse comma-separated positive integers, as an argparse type; drop duplicates."""
    return list(dict.fromkeys(positive(part.strip()) for part in text.split(",")))
