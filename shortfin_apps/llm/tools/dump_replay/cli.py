"""`shortfin-llm replay-dump`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.tools.bench.console import add_json, positive, progress_bar, show

if TYPE_CHECKING:
    from rich.console import Console

    from shortfin_apps.llm.components.recorder.dump_file import Dump
    from shortfin_apps.llm.tools.dump_replay.session import Summary

DESCRIPTION = """\
Runs the invocations of a flight recorder's dump again, with the same arguments and the same contents of
pages, and compares the results with the server's."""

EPILOG = """\
examples:
  shortfin-llm replay-dump dump-20260102T030405Z-17-1.jsonl.gz smollm2       # on this CPU
  shortfin-llm replay-dump FILE smollm2-mi300 --device hip                   # on a GPU
  python -m shortfin_apps.llm replay-dump FILE smollm2-mi300 --emulated      # emulated, with its checks
  shortfin-llm replay-dump FILE --trace timeline.json                        # for https://ui.perfetto.dev

The exit status is 0 if everything came out as on the server, failures included, and else 1.
A dump holds token ids of users' requests: docs/flight_recorder.md."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a dump of `shortfin-llm serve`")
    parser.add_argument(
        "directory", type=Path, nargs="?", metavar="DIR", help="the artefact that was served, or one like it"
    )
    parser.add_argument("--device", default="cpu", help="cpu, hip or cuda (default: cpu)")
    parser.add_argument("--device-ids", default="", metavar="ID,...", help="GPUs, one per pipeline stage")
    parser.add_argument("--runtime", choices=("auto", "shortfin", "iree"), default="auto")
    parser.add_argument(
        "--threads", type=positive, metavar="N", help="CPU workers (default: all CPUs, at most 64)"
    )
    parser.add_argument(
        "--emulated", action="store_true", help="on an emulated AMD GPU, with its checks; needs a checkout"
    )
    parser.add_argument(
        "--from", dest="first", type=int, default=0, metavar="N", help="compare from this record on"
    )
    parser.add_argument("--to", dest="last", type=int, metavar="N", help="stop after this record")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the timeline for Perfetto")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Replay the dump, write its trace or do both; return the exit status. Raises LlmError."""
    from shortfin_apps.llm.components.recorder.dump_file import read_dump
    from shortfin_apps.llm.tools.dump_replay.report import document, print_dump, print_summary

    if args.directory is None and args.trace is None:
        raise InvalidRequestError("give the artefact's DIR to replay the dump, or --trace, or both")
    dump = read_dump(args.file)
    if args.trace is not None:
        _write_trace(dump, args.trace)
    summary = None if args.directory is None else _replay(dump, args)

    def print_tables(console: Console) -> None:
        print_dump(console, dump)
        if summary is not None:
            print_summary(console, summary)

    show(document(dump, summary), args.json, print_tables)
    return 0 if summary is None or summary.is_as_recorded else 1


def _replay(dump: Dump, args: argparse.Namespace) -> Summary:
    from shortfin_apps.llm.components.recorder.records import Turn
    from shortfin_apps.llm.tools.dump_replay.session import Where, replay  # imports the device libraries

    where = Where(
        device=args.device,
        runtime=args.runtime,
        threads=args.threads,
        device_ids=tuple(part for part in args.device_ids.split(",") if part),
        emulated=args.emulated,
    )
    total = sum(not isinstance(record, Turn) for record in dump.recording.records)
    with progress_bar("records") as progress:
        bar = progress.add_task("replaying", total=total)
        return replay(
            dump,
            args.directory,
            where,
            first=args.first,
            last=args.last,
            on_record=lambda: progress.advance(bar),
        )


def _write_trace(dump: Dump, path: Path) -> None:
    from shortfin_apps.llm.tools.dump_replay.trace import trace

    try:
        path.write_text(json.dumps(trace(dump)), encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"cannot write {path}: {error.strerror}", "trace") from error
