"""`shortfin-llm bench`: measures servers and prints a report."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shortfin_apps.llm.client.sending import DEFAULT_URL
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.terminal.options import API_KEY_VARIABLE, own_key
from shortfin_apps.llm.tools.bench.console import (
    add_json,
    positive,
    positives,
    progress_bar,
    table_console,
    write_json,
)
from shortfin_apps.llm.tools.bench.load import run_campaign
from shortfin_apps.llm.tools.bench.report import compare, document, print_report, ratio_table, read_document
from shortfin_apps.llm.tools.bench.roofline import cli as roofline_cli
from shortfin_apps.llm.tools.bench.target import TargetOptions, open_target, parse_urls
from shortfin_apps.llm.tools.bench.workload import PRESETS, Workload, chosen_presets, custom_workloads

EXIT_REQUESTS_FAILED = 1

DESCRIPTION = """\
Measures any server with OpenAI's /v1/completions: streams answers of fixed length to prompts of fixed
length, and prints requests/s, tokens/s, and the 50th and 99th percentile of TTFT (time to first token),
ITL (time between chunks), TPOT (time per token after the first) and latency. Several servers are measured
in turns; ratios within one run are more reliable than figures of two runs."""
EPILOG = (
    "presets:\n"
    + "\n".join(f"  {w.name}  {w.about}" for w in PRESETS.values())
    + """

examples:
  shortfin-llm bench                                          # all presets, the server on port 8000
  shortfin-llm bench --preset W2,W3 --repeat 3 --json out.json
  shortfin-llm bench --url ours=http://127.0.0.1:8000 --url vllm=http://127.0.0.1:8001 --repeat 3
  shortfin-llm bench --preset W2 --compare out.json           # against an earlier run
  shortfin-llm bench --prompt-tokens 256 --output-tokens 64 --concurrency 1,2,4,8,16,32,64
  shortfin-llm bench roofline smollm2                         # compiled entries against hardware limits

The exit status is 1 when a request failed.
"""
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    tools = parser.add_subparsers(dest="tool", metavar="TOOL", title="other tools")
    roofline_cli.add_parser(tools)
    _add_workload_options(parser)
    _add_server_options(parser)
    output = parser.add_argument_group("output")
    add_json(output)
    output.add_argument(
        "--histogram",
        action=argparse.BooleanOptionalAction,
        help="draw histograms of TTFT and ITL (default: if stdout is a terminal)",
    )
    output.add_argument("--compare", type=Path, metavar="FILE", help="print ratios to an earlier run's JSON")


def _add_workload_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument("--preset", metavar="W1,..", help="presets, or all (default: all)")
    group.add_argument("--repeat", type=positive, default=1, metavar="N", help="repetitions (default: 1)")
    group.add_argument("--seed", help="derive prompts from this seed; a server may have them cached")
    custom = parser.add_argument_group("custom workload, instead of a preset")
    custom.add_argument("--prompt-tokens", type=positive, metavar="N", help="prompt length (default: 128)")
    custom.add_argument("--output-tokens", type=positive, metavar="N", help="answer length (default: 128)")
    custom.add_argument(
        "--concurrency",
        type=positives,
        metavar="N,..",
        help="number of clients; several values: several runs",
    )
    custom.add_argument(
        "--requests", type=positive, metavar="N", help="requests in all (default: 2 for each client)"
    )
    custom.add_argument(
        "--shared-prefix-tokens", type=positive, metavar="N", help="length of a prefix common to all prompts"
    )


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--url",
        action="append",
        metavar="[LABEL=]URL",
        help=f"the server's address; repeat to measure several (default: {DEFAULT_URL})",
    )
    group.add_argument("--model", help="the model's name (default: the first that the server lists)")
    group.add_argument("--api-key", default=own_key(), help=f"(default: the first of ${API_KEY_VARIABLE})")
    group.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="tokenizer.json, if the server has no /tokenize"
    )
    group.add_argument(
        "--text-prompts", action="store_true", help="send text instead of token ids; lengths are approximate"
    )
    group.add_argument("--timeout", type=float, default=600.0, metavar="S", help="read timeout (seconds)")


def run(args: argparse.Namespace) -> int:
    if args.tool is not None:
        return roofline_cli.run(args)
    workloads = chosen_workloads(args)
    earlier = None if args.compare is None else read_document(args.compare)  # fails before measuring
    doc = asyncio.run(_measure(args, workloads))
    # Tables would corrupt JSON on stdout.
    if args.json != "-":
        print_tables(doc, earlier, draws_histograms(args.histogram))
    if args.json is not None:
        write_json(doc, args.json)
    return EXIT_REQUESTS_FAILED if any(run["errors"] for run in doc["runs"]) else 0


def chosen_workloads(args: argparse.Namespace) -> list[Workload]:
    """Return the presets or the custom workload chosen by the flags. Raises InvalidRequestError for both."""
    names = ("prompt_tokens", "output_tokens", "concurrency", "requests", "shared_prefix_tokens")
    given = [name for name in names if getattr(args, name) is not None]
    if not given:
        return chosen_presets(args.preset or "all")
    if args.preset is not None:
        option = "--" + given[0].replace("_", "-")
        raise InvalidRequestError(f"{option} changes a preset; give either --preset or a custom workload")
    return custom_workloads(
        args.prompt_tokens or 128,
        args.output_tokens or 128,
        args.concurrency or [1],
        args.requests,
        args.shared_prefix_tokens or 0,
    )


async def _measure(args: argparse.Namespace, workloads: Sequence[Workload]) -> dict[str, Any]:
    started = datetime.now(UTC)
    # Without --seed, the seed is random, so that no server has the prompts cached.
    seed = secrets.token_hex(4) if args.seed is None else args.seed
    options = TargetOptions(
        model=args.model,
        api_key=args.api_key,
        tokenizer=args.tokenizer,
        text_prompts=args.text_prompts,
        timeout_s=args.timeout,
    )
    async with AsyncExitStack() as stack:
        urls = parse_urls(args.url or [DEFAULT_URL])
        targets = [await stack.enter_async_context(open_target(*url, options)) for url in urls]
        requests = sum(len(w.prompt_tokens) * len(w.passes) for w in workloads)
        with progress_bar("requests") as progress:
            task = progress.add_task("", total=requests * len(targets) * args.repeat)
            results = [
                result
                async for result in run_campaign(
                    targets,
                    workloads,
                    args.repeat,
                    seed,
                    lambda about: progress.update(task, description=about),
                    lambda _: progress.advance(task),
                )
            ]
    return document(targets, workloads, results, seed, started)


def draws_histograms(chosen: bool | None) -> bool:
    """Whether to draw histograms; None in `chosen` (no flag): only if stdout is a terminal."""
    return sys.stdout.isatty() if chosen is None else chosen


def print_tables(doc: dict[str, Any], earlier: dict[str, Any] | None, histograms: bool) -> None:
    """Print the report, and the ratios to an earlier run if given."""
    console = table_console()
    print_report(console, doc, histograms)
    if earlier is not None:
        rows = compare(doc, earlier)
        title = f"ratios to the run of {earlier['started']} (the machine's speed may have drifted since)"
        console.print(ratio_table(rows, title) if rows else "the earlier run has none of these workloads")
