"""`shortfin-llm bench roofline`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.tools.bench.console import add_json, positive, positives, show

if TYPE_CHECKING:
    from shortfin_apps.llm.tools.bench.roofline.cases import Choice

REPEATS = 5

DESCRIPTION = """\
Compares the time of each entry of a compiled model with this machine's limits. Times in turns: the entries,
called back to back as the server calls them; a streaming read of as many bytes as the entry must move; and
a large matmul compiled like the model's own. The floor is the larger of bytes / bandwidth and
FLOPs / matmul peak; bench/README.md says what is counted."""
EPILOG = """\
examples:
  shortfin-llm bench roofline smollm2
  shortfin-llm bench roofline smollm2 --entry 'decode_*' --context 256,4096
  shortfin-llm bench roofline smollm2 --entry decode_bs8 --profile
  shortfin-llm bench roofline smollm2 --entry extend --prompt-tokens 512 --json out.json
  shortfin-llm bench roofline smollm2-mi300 --entry decode_bs1 --emulated

Run nothing else meanwhile: another process takes bandwidth from the entries and from the probes, but not
evenly."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "roofline",
        help="compare the entries of a compiled model with this machine's limits",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="an artefact of `shortfin-llm build`")
    parser.add_argument(
        "--entry", action="append", default=[], metavar="PATTERN", help="only entries that match; repeatable"
    )
    parser.add_argument(
        "--context", type=positives, default=[256], metavar="N,..", help="context of decodes (default: 256)"
    )
    parser.add_argument(
        "--prompt-tokens",
        type=positives,
        default=[512],
        metavar="N,..",
        help="length of prefills (default: 512)",
    )
    parser.add_argument("--repeat", type=positive, metavar="N", help="samples (default: 5)")
    parser.add_argument(
        "--threads", type=positive, metavar="N", help="CPU workers (default: all CPUs, at most 64)"
    )
    parser.add_argument(
        "--profile", action="store_true", help="also sample the time spent in each dispatch (Linux, CPUs)"
    )
    parser.add_argument(
        "--emulated",
        action="store_true",
        help="count bytes, matrix operations and launches on an emulated AMD GPU; needs a checkout",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure or count, as `--emulated` tells, and print the results. Raises LlmError."""
    return _run_emulated(args) if args.emulated else _run_timed(args)


def _run_emulated(args: argparse.Namespace) -> int:
    from shortfin_apps.llm.tools.bench.roofline.report import counts_table, limits_line
    from shortfin_apps.llm.tools.bench.roofline.run import roofline_counts

    for flag in ("repeat", "threads", "profile"):
        if getattr(args, flag):
            raise InvalidRequestError(f"--{flag} is about time, of which --emulated measures none", flag)
    doc = roofline_counts(args.directory, _choice(args))

    def print_tables(console: Console) -> None:
        console.print(counts_table(doc))
        console.print(limits_line(doc), highlight=False)

    show(doc, args.json, print_tables)
    return 0


def _run_timed(args: argparse.Namespace) -> int:
    from shortfin_apps.llm.tools.bench.roofline.report import profile_tables, speeds, table
    from shortfin_apps.llm.tools.bench.roofline.run import roofline  # imports the compiler's bindings

    repeats = args.repeat or REPEATS
    doc = roofline(args.directory, _choice(args), repeats, args.threads, with_profile=args.profile)

    def print_tables(console: Console) -> None:
        console.print(table(doc))
        console.print(speeds(doc), highlight=False)
        console.print(*profile_tables(doc), sep="\n")

    show(doc, args.json, print_tables)
    return 0


def _choice(args: argparse.Namespace) -> Choice:
    from shortfin_apps.llm.tools.bench.roofline.cases import Choice

    return Choice(args.entry, args.context, args.prompt_tokens)
