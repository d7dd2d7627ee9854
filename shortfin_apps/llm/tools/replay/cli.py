"""`shortfin-llm replay`."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.terminal.options import add_server_options, open_client
from shortfin_apps.llm.tools.bench.console import add_json, show

if TYPE_CHECKING:
    from rich.console import Console

    from shortfin_apps.llm.serving.receipts.receipt import Receipt
    from shortfin_apps.llm.tools.replay.compare import Outcome

DESCRIPTION = """\
Recomputes an answer from its receipt, and compares tokens and logits bit by bit. A request gets a receipt
with `"receipt": true`; a server adds one to every answer with `--receipts`.

With DIR, the artefact that computed the answer, this process recomputes it in several ways: alone, with a
cached prompt, in a full batch, in other chunks, after preemptions, and in the other batch mode. Without
DIR, a running server recomputes it. docs/determinism.md lists which results are bit-identical, and which
are not promised."""
EPILOG = """\
examples:
  curl -s localhost:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{"prompt": "Once", "receipt": true}' > answer.json
  shortfin-llm replay answer.json                      # on the server, by default http://127.0.0.1:8000
  shortfin-llm replay answer.json smollm2              # here, in every way
  shortfin-llm replay answer.json smollm2 --schedule alone,extend-attention
  shortfin-llm replay answers.jsonl smollm2 --public-key public.pem --json -

RECEIPT may be a receipt, an answer that has some, a stream of events, or lines of any of them.
The exit status is 0 if all is the same, 1 if anything differs, 2 for what cannot be replayed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("receipt", metavar="RECEIPT", help="a file with receipts; `-` reads stdin")
    parser.add_argument("directory", type=Path, nargs="?", metavar="DIR", help="the artefact that answered")
    parser.add_argument("--public-key", type=Path, metavar="FILE", help="verify the signatures with this key")
    add_json(parser)
    group = parser.add_argument_group("with DIR")
    group.add_argument("--schedule", metavar="NAMES", help="the ways to compute it (default: all of them)")
    group.add_argument("--device", default="cpu", help="where to compute it (default: %(default)s)")
    add_server_options(parser)
    parser.add_argument(
        "--concurrency", type=int, default=1, metavar="N", help="requests at once (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Replay receipts and print the outcome; return the exit status. Raises LlmError."""
    from shortfin_apps.llm.tools.replay.compare import table
    from shortfin_apps.llm.tools.replay.reading import read_receipts

    receipts = read_receipts(args.receipt)
    if args.public_key is not None:
        _verify(receipts, args.public_key)
    outcomes = _on_server(receipts, args) if args.directory is None else _in_process(receipts, args)

    def print_tables(console: Console) -> None:
        console.print(table(outcomes))

    doc = {"verified": args.public_key is not None, "schedules": [each.document() for each in outcomes]}
    show(doc, args.json, print_tables)
    return 1 if any(outcome.differences for outcome in outcomes) else 0


def _verify(receipts: Sequence[Receipt], public_key: Path) -> None:
    from shortfin_apps.llm.serving.receipts.signature import Verifier

    verifier = Verifier.load(public_key)
    for receipt in receipts:
        verifier.check(receipt)


def _on_server(receipts: Sequence[Receipt], args: argparse.Namespace) -> list[Outcome]:
    from shortfin_apps.llm.tools.replay.over_http import replay_on

    if args.schedule is not None:
        raise InvalidRequestError("`--schedule` needs DIR: a server has its own", "schedule")
    if args.concurrency < 1:
        raise InvalidRequestError("`--concurrency` must be at least 1", "concurrency")

    async def ask() -> Outcome:
        async with open_client(args) as client:
            return await replay_on(client, receipts, args.concurrency)

    return [asyncio.run(ask())]


def _in_process(receipts: Sequence[Receipt], args: argparse.Namespace) -> list[Outcome]:
    from shortfin_apps.llm.tools.replay.in_process import SCHEDULES, opened, replay

    names = list(SCHEDULES) if args.schedule is None else args.schedule.split(",")
    if unknown := [name for name in names if name not in SCHEDULES]:
        raise InvalidRequestError(
            f"no schedule is named {unknown[0]!r}; there are {', '.join(SCHEDULES)}", "schedule"
        )
    with opened(args.directory, receipts, args.device) as subject:
        return [replay(subject, SCHEDULES[name]) for name in names]
