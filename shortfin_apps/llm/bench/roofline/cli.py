"""`shortfin-llm bench roofline`."""

from __future__ import annotations

import argparse
from pathlib import Path

from shortfin_apps.llm.bench.console import positive, positives, table_console, write_json
from shortfin_apps.llm.cli import Subparsers

DESCRIPTION = """\
Holds each entry of a compiled model against what this machine can do. In turns it times the entries,
called back to back as the server calls them, a streaming read of as many bytes as the entry cannot do
without, and a large matmul made like the model's own. The floor is the longer of bytes / bandwidth and
FLOPs / matmul peak; bench/README.md says what is counted."""
EPILOG = """\
examples:
  shortfin-llm bench roofline smollm2
  shortfin-llm bench roofline smollm2 --entry 'decode_*' --context 256,4096
  shortfin-llm bench roofline smollm2 --entry decode_bs8 --profile
  shortfin-llm bench roofline smollm2 --entry extend --prompt-tokens 512 --json out.json

Leave the machine alone meanwhile: a second process takes bandwidth from both sides of the ratio, but not
always at the same time."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "roofline",
        help="hold the entries of a compiled model against this machine's limits",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="what `shortfin-llm build` made")
    parser.add_argument(
        "--entry", action="append", default=[], metavar="PATTERN", help="only entries like this; repeatable"
    )
    parser.add_argument(
        "--context", type=positives, default=[256], metavar="N,..", help="of decodes (default: 256)"
    )
    parser.add_argument(
        "--prompt-tokens", type=positives, default=[512], metavar="N,..", help="of prefills (default: 512)"
    )
    parser.add_argument("--repeat", type=positive, default=5, metavar="N", help="in turns (default: 5)")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU workers (default: all CPUs)")
    parser.add_argument(
        "--profile", action="store_true", help="also sample in which dispatches the time goes (Linux, CPUs)"
    )
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON; `-`: to stdout, no table")


def run(args: argparse.Namespace) -> int:
    """Measures and prints. Raises LlmError."""
    from shortfin_apps.llm.bench.roofline.report import profile_tables, speeds, table
    from shortfin_apps.llm.bench.roofline.run import roofline  # loads the compiler's bindings

    doc = roofline(
        args.directory,
        patterns=args.entry,
        contexts=args.context,
        prompt_tokens=args.prompt_tokens,
        repeats=args.repeat,
        threads=args.threads,
        with_profile=args.profile,
    )
    if args.json != "-":
        console = table_console()
        console.print(table(doc))
        console.print(speeds(doc), highlight=False)
        console.print(*profile_tables(doc), sep="\n")
    if args.json is not None:
        write_json(doc, args.json)
    return 0
