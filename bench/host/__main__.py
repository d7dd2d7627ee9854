"""Measures what a token costs the host, with a device that costs no CPU time.

    python -m bench.host engine                  # CPU time of the engine's thread for a step
    python -m bench.host http --step-ms 10       # the whole server over loopback, a chunk for each token
    python -m bench.host http --step-ms 0        # as many tokens as the CPUs bear
    python -m bench.host streams --step-ms 5     # CPU times of the event loop and of the engine
    python -m bench.host streams --step-ms 5 --api-processes 2
    python -m bench.host streams --url http://127.0.0.1:8000 --pid 1234

CPU times hardly depend on what else runs on the machine; tokens/s do.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import statistics
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from bench.host.engine import SAMPLINGS, mixed_step_us, steady_step_us
from bench.host.http import HttpFigures
from bench.host.http import stream_tokens as stream_to_http_clients
from bench.host.streams import StreamFigures, stream_from, stream_tokens


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    if (args.url is None) != (args.pid is None):
        parser.error("--url and --pid belong together")
    rows = [int(number) for number in args.rows.split(",")]
    if args.what == "engine":
        _engine(rows, args.repeat, args.profile)
    elif args.what == "streams":
        _streams(rows, args.repeat, _run_of(args))
    else:
        _http(rows, args.repeat, args.step_ms, args.profile)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.host",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("engine", "http", "streams"))
    parser.add_argument("--rows", default="1,32,128,256", metavar="N,N,...", help="requests at once")
    parser.add_argument("--repeat", type=int, default=3, help="runs whose medians are printed")
    parser.add_argument(
        "--step-ms", type=float, default=10.0, help="http, streams: time that the device takes for a step"
    )
    parser.add_argument(
        "--api-processes",
        type=int,
        default=0,
        metavar="N",
        help="streams: processes that answer HTTP; 0: the engine's",
    )
    parser.add_argument("--url", help="streams: a server that runs already, of any kind")
    parser.add_argument("--pid", type=int, help="with --url: its process that answers HTTP")
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="cProfile's counts of the engine's or event loop's thread",
    )
    return parser


def _engine(rows: list[int], repeat: int, profile: Path | None) -> None:
    """Print CPU times of a step; each repeat measures every kind once, so that kinds compare."""
    profiler = cProfile.Profile()
    print("| requests | us a token | us a step: " + " | ".join(SAMPLINGS) + " | mixed |")
    print("|---" * (len(SAMPLINGS) + 3) + "|")
    for count in rows:
        if profile is not None:
            for sampling in SAMPLINGS:
                profiler.runcall(steady_step_us, count, sampling)
            profiler.runcall(mixed_step_us, count)
        runs = [
            [*(steady_step_us(count, sampling) for sampling in SAMPLINGS), mixed_step_us(count)]
            for _ in range(repeat)
        ]
        medians = [statistics.median(times) for times in zip(*runs, strict=True)]
        steps = " | ".join(f"{step_us:.1f}" for step_us in medians)
        print(f"| {count} | {medians[0] / count:.2f} | {steps} |", flush=True)
    if profile is not None:
        profiler.dump_stats(profile)


def _http(rows: list[int], repeat: int, step_ms: float, profile: Path | None) -> None:
    print("| requests | tok/s | server, us a token | client, us a token | tokens a chunk | errors |")
    print("|---|---|---|---|---|---|")
    for count in rows:
        runs = [asyncio.run(stream_to_http_clients(count, step_ms, profile)) for _ in range(repeat)]
        print(f"| {count} | {_medians(runs)} |", flush=True)


def _streams(rows: list[int], repeat: int, run: Callable[[int], StreamFigures]) -> None:
    print("| requests | tok/s | HTTP, us a token | link, us a token | engine, us a token |", end="")
    print(" ITL p50, ms | ITL p99, ms | tokens a chunk | errors |")
    print("|---|---|---|---|---|---|---|---|---|")
    for count in rows:
        runs = [run(count) for _ in range(repeat)]
        print(f"| {count} | {_medians(runs)} |", flush=True)


def _run_of(args: argparse.Namespace) -> Callable[[int], StreamFigures]:
    """Return a function that measures streams from our own server, or from the one given by URL."""
    if args.url is not None:
        return lambda rows: stream_from(args.url, rows, args.pid)
    return lambda rows: stream_tokens(rows, args.step_ms, args.profile, args.api_processes)


def _medians(runs: Sequence[HttpFigures] | Sequence[StreamFigures]) -> str:
    """Format the median of each figure over the runs, and the sum of errors, the last figure."""
    *names, _ = (field.name for field in fields(runs[0]))
    medians = [statistics.median(getattr(run, name) for run in runs) for name in names]
    return " | ".join(
        [f"{medians[0]:.0f}", *(f"{value:.2f}" for value in medians[1:]), str(sum(r.errors for r in runs))]
    )


if __name__ == "__main__":
    main()
