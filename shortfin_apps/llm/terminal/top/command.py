"""`shortfin-llm top`: a live table of a running server."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict

from shortfin_apps.llm.client import LlmClient
from shortfin_apps.llm.console import PlainConsole
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.terminal.options import add_address_options
from shortfin_apps.llm.terminal.top.figures import Figures, WatchedServer
from shortfin_apps.llm.terminal.top.table import FiguresTable, server_line

TIMEOUT_S = 10.0  # for one reading
SHORTEST_INTERVAL_S = 0.1

DESCRIPTION = """\
Shows the activity of a running server, from its /metrics and /server_info: tokens/s in and out, requests,
latencies, pages of the KV cache, the batches of each entry, preemptions and refusals. Running and waiting
requests and pages are current values; all other figures cover the last interval. Other servers are
supported as far as they have vLLM's metrics. A server that does not respond is polled until it does."""
EPILOG = """\
keys: p pauses and resumes, q quits

examples:
  shortfin-llm top
  shortfin-llm top --url http://gpu1:8000 --interval 5
  shortfin-llm top --once --json | jq .tokens_out_per_s
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--interval", type=seconds, default=2.0, metavar="S", help="seconds between readings (default: 2)"
    )
    parser.add_argument("--once", action="store_true", help="print the table of one interval, then exit")
    parser.add_argument("--json", action="store_true", help="with --once: print the figures as JSON")
    add_address_options(parser.add_argument_group("server"))


def seconds(text: str) -> float:
    """Parse a number of seconds of at least SHORTEST_INTERVAL_S, as an argparse type."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not SHORTEST_INTERVAL_S <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from {SHORTEST_INTERVAL_S} on")
    return value


def run(args: argparse.Namespace) -> int:
    if args.json and not args.once:
        raise InvalidRequestError("--json prints the figures of one interval; give --once, too", "json")
    if not args.once and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidRequestError("the live table needs a terminal; --once prints one table", "once")
    asyncio.run(_run(args))
    return 0


async def _run(args: argparse.Namespace) -> None:
    async with LlmClient(args.url, args.api_key, timeout_s=TIMEOUT_S, max_retries=0) as client:
        server = WatchedServer(client)
        if args.once:
            await server.read()
            await asyncio.sleep(args.interval)
            _print(server, await server.read(), args.json)
            return
        from shortfin_apps.llm.terminal.top.live import LiveTable

        await LiveTable(server, PlainConsole(), args.interval).watch()


def _print(server: WatchedServer, figures: Figures, as_json: bool) -> None:
    if as_json:
        print(
            json.dumps({"url": server.url, "model": server.info.get("served_model_name"), **asdict(figures)})
        )
        return
    console = PlainConsole()
    console.print(server_line(server.url, server.info), highlight=False, soft_wrap=True)
    console.print(FiguresTable(figures))
