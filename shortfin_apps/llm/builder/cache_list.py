"""The `shortfin-llm list` command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import datetime

from shortfin_apps.llm.builder.cache import user_cache
from shortfin_apps.llm.builder.cache_contents import Held, contents
from shortfin_apps.llm.console import visible

DESCRIPTION = """\
Lists the contents of the cache, most recently used first: models built by `serve SOURCE`, weights and
programs that builds reuse, and downloads. The hub's own cache (HF_HOME) is not listed. SHORTFIN_LLM_CACHE
names another folder."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: `list` has no arguments."""


def run(args: argparse.Namespace) -> int:
    """Print the table and the cache folder."""
    held = contents(user_cache())
    print(visible("\n".join(table(held))))
    print(f"{megabytes(sum(one.size for one in held))} in {user_cache()}")
    return 0


def table(held: Sequence[Held]) -> list[str]:
    """Format one line per entry, in columns: kind, source, device, size, last use."""
    rows = [(one.kind, one.source, one.device, megabytes(one.size), _date(one.last_use)) for one in held]
    rows.insert(0, ("kind", "source", "device", "size", "last use"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
