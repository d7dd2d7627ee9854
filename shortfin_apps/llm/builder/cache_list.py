"""The `shortfin-llm list` command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from shortfin_apps.llm.builder.cache import KERNELS, user_cache
from shortfin_apps.llm.builder.cache_contents import Held, contents
from shortfin_apps.llm.console import visible

DESCRIPTION = """\
Lists the contents of the cache, most recently used first: models built by `serve SOURCE`, weights,
programs and GPU kernels that builds reuse, and downloads. The hub's own cache (HF_HOME) is not listed.
SHORTFIN_LLM_CACHE names another folder."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: `list` has no arguments."""


def run(args: argparse.Namespace) -> int:
    """Print the table and the cache folder."""
    held = contents(user_cache())
    print(visible("\n".join(table(held))))
    print(f"{megabytes(sum(one.size for one in held))} in {user_cache()}")
    return 0


def table(held: Sequence[Held]) -> list[str]:
    """Format one line per entry, in columns: kind, source, device, size, last use.

    The kernels for a device have one line, at the place of the most recently used one.
    """
    held = _with_kernels_together(held)
    rows = [(one.kind, one.source, one.device, megabytes(one.size), _date(one.last_use)) for one in held]
    rows.insert(0, ("kind", "source", "device", "size", "last use"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _with_kernels_together(held: Sequence[Held]) -> list[Held]:
    """Replace the kernels for each device by one entry; `held` has the most recently used first."""
    totals: dict[object, Held] = {}
    for one in held:
        key = (one.kind, one.device) if one.kind == KERNELS else one.path
        found = totals.get(key)
        totals[key] = replace(found, size=found.size + one.size) if found else one
    return list(totals.values())


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
