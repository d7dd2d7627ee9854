"""The `shortfin-llm prune` command."""

from __future__ import annotations

import argparse
import math
import time

from shortfin_apps.llm.builder.cache import user_cache
from shortfin_apps.llm.builder.cache_contents import contents, remove, to_remove
from shortfin_apps.llm.builder.cache_list import megabytes, table
from shortfin_apps.llm.console import visible
from shortfin_apps.llm.contract.errors import BuildError

DESCRIPTION = """\
Removes entries that `shortfin-llm list` shows and that have not been used for long. They are built or
downloaded again when needed. Entries in use by a running build are kept."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--older-than", type=_amount, metavar="DAYS", help="remove what was last used more days ago"
    )
    parser.add_argument(
        "--max-size", type=_amount, metavar="GB", help="keep what was used last, up to so many gigabytes"
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def run(args: argparse.Namespace) -> int:
    """Remove the cache entries beyond the given limits, and print a table of these entries.

    With `--dry-run`, only prints the table. Raises BuildError if no limit is given.
    """
    if args.older_than is None and args.max_size is None:
        raise BuildError("give --older-than DAYS, --max-size GB or both")
    max_size = None if args.max_size is None else int(args.max_size * 1e9)
    chosen = to_remove(contents(user_cache()), time.time(), args.older_than, max_size)
    removed = chosen if args.dry_run else [one for one in chosen if remove(one)]
    if removed:
        print(visible("\n".join(table(removed))))
    print(f"{'would free' if args.dry_run else 'freed'} {megabytes(sum(one.size for one in removed))}")
    if busy := len(chosen) - len(removed):
        print(f"{busy} in use by a build")
    return 0


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return value
