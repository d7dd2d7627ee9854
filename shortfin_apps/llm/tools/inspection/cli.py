"""`shortfin-llm inspect`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.tools.bench.console import add_json, show

if TYPE_CHECKING:
    from shortfin_apps.llm.tools.inspection.subject import Subject

DESCRIPTION = """\
Shows the contents of a compiled model: entries and their shapes, sizes, target and versions; for AMD GPUs
also the kernels, read from their machine code, with remarks on unusual ones. No GPU is needed."""

EPILOG = """\
examples:
  shortfin-llm inspect smollm2                             # what is in it; of kernels those with remarks
  shortfin-llm inspect smollm2-mi300 --entry decode_bs1 --all | less -S    # every kernel of one entry
  shortfin-llm inspect smollm2-fleet --program gfx1100     # one of the programs for several devices
  shortfin-llm inspect smollm2-mi300 --json - | jq .kernels      # for other programs
  shortfin-llm inspect --vmfb model.vmfb --model-config config.json

Registers, LDS and scratch are what the compiler wrote into each kernel's metadata; instructions are counted
in the code, so one in a loop counts once; dispatches are those that one call of an entry records."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", type=Path, nargs="?", metavar="DIR", help="an artefact of `shortfin-llm build`"
    )
    parser.add_argument(
        "--entry", action="append", default=[], metavar="PATTERN", help="only entries that match; repeatable"
    )
    parser.add_argument(
        "--program",
        metavar="NAME",
        help="of an artefact for several devices, the program for this CPU or chip (default: the first whose "
        "files are there)",
    )
    parser.add_argument("--all", action="store_true", help="show kernels without remarks, too")
    add_json(parser)
    group = parser.add_argument_group("loose files, instead of DIR")
    group.add_argument("--vmfb", type=Path, metavar="FILE", help="compiled model")
    group.add_argument("--model-config", type=Path, metavar="FILE", help="its config.json")
    group.add_argument(
        "--parameters",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="its parameters; repeatable",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report; return the exit status. Raises LlmError."""
    from rich.console import Console

    from shortfin_apps.llm.tools.inspection.report import document, make_report, select_entries
    from shortfin_apps.llm.tools.inspection.tables import MIN_WIDTH, tables

    report = select_entries(make_report(_subject(args)), args.entry)

    def print_tables(console: Console) -> None:
        console.width = max(console.width, MIN_WIDTH if report.kernels else 0)
        console.print(*tables(report, show_all=args.all), sep="\n", highlight=False)

    show(document(report), args.json, print_tables)
    return 0


def _subject(args: argparse.Namespace) -> Subject:
    from shortfin_apps.llm.tools.inspection.subject import open_directory, open_files

    loose = (args.vmfb, args.model_config, *args.parameters)
    if args.directory is not None and not any(loose):
        return open_directory(args.directory, args.program)
    if args.directory is None and args.program is None and args.vmfb and args.model_config:
        return open_files(args.vmfb, args.model_config, tuple(args.parameters))
    raise InvalidRequestError(
        "name an artefact's directory, or a compiled model with --vmfb and --model-config", "directory"
    )
