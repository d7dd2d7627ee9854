"""`shortfin-llm cluster MODEL --workers N`: starts several servers and a router in front of them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import secrets
import shlex
import signal
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from shortfin_apps.llm.console import visible
from shortfin_apps.llm.serving.server import flags as server_flags
from shortfin_apps.llm.serving.server import logs as server_logging
from shortfin_apps.llm.serving.server.building import BuildFailed, built, fitted
from shortfin_apps.llm.serving.server.config import ServerConfig
from shortfin_apps.llm.serving.server.keys import read_keys
from shortfin_apps.llm.serving.server.model_loading import open_artifact
from shortfin_apps.llm.tools.bench.console import positive
from shortfin_apps.llm.tools.cluster.ports import LOOPBACK, HeldPort, Wanted, free_ports
from shortfin_apps.llm.tools.cluster.router_flags import (
    METRICS_PORT,
    METRICS_ROUTES,
    PACKAGES,
    ROUTER_NAMES,
    ClusterOptions,
    Keys,
    check_installed,
    dangers,
    router_flags,
)
from shortfin_apps.llm.tools.cluster.supervisor import ClusterError, Member, Program, Supervisor
from shortfin_apps.llm.tools.cluster.worker_settings import check, worker_settings

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED = 0, 1
HIGHEST_PORT = 65_535
PROGRAM = "shortfin_apps.llm.tools.cluster.program"
DESCRIPTION = """\
Starts several workers, each a `serve` on loopback, and a router in front of them that sends requests with
a common prefix to the same worker. The flags are the ones of `serve`: address, TLS and CORS origins apply
to the router, keys to the router and all workers, and all others to each worker. Processes that end are
restarted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    server_flags.add_arguments(parser)
    group = parser.add_argument_group("the cluster")
    group.add_argument("--workers", type=positive, default=2, metavar="N", help="workers (default: 2)")
    group.add_argument(
        "--router",
        choices=ROUTER_NAMES,
        default="smg",
        help="smg (Shepherd Model Gateway, of the extra `cluster`) or vllm-router (default: smg)",
    )
    group.add_argument(
        "--policy",
        default="cache_aware",
        help="how the router chooses a worker, by its own names; cache_aware sends requests with a common "
        "prefix to the same worker, unless that has much more to do (default: cache_aware)",
    )
    group.add_argument(
        "--metrics-port",
        type=_port,
        default=METRICS_PORT,
        metavar="N",
        help=f"loopback port of the router's own metrics; 0 takes a free one (default: {METRICS_PORT})",
    )
    group.add_argument(
        "--start-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds for each process to become ready (default: 600)",
    )
    group.add_argument(
        "--router-flags",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="FLAG",
        help="the rest of the command line goes to the router, as in `--router-flags --cache-threshold 0.5`",
    )


def run(args: argparse.Namespace) -> int:
    """Run the cluster until a signal; return the exit status. Raises LlmError if the cluster cannot start."""
    notes: list[str] = []
    config = server_flags.from_arguments(args, notes.append)
    server_logging.set_up(config.http.log_level, config.http.log_format)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # at INFO, httpx logs every readiness probe
    for note in notes:
        logger.warning(note)
    options = ClusterOptions(
        workers=args.workers,
        router=args.router,
        policy=args.policy,
        metrics_port=args.metrics_port,
        start_timeout_s=args.start_timeout,
        router_flags=tuple(args.router_flags),
    )
    try:
        check_installed(options.router)
        check(config)
        config = fitted(built(config))
        name = config.model.served_model_name or open_artifact(config).name
        return asyncio.run(_serve(config, options, name))
    except BuildFailed as failure:  # the build has already logged the reason
        return failure.status
    finally:
        server_logging.flush()


async def _serve(config: ServerConfig, options: ClusterOptions, name: str) -> int:
    """Run the cluster until a signal, which drains it; a second signal kills it. Return the exit status."""
    wanted = [
        Wanted(config.http.host, config.http.port, "--port"),
        Wanted(LOOPBACK, options.metrics_port, "--metrics-port"),
    ]
    ports = free_ports(wanted)
    with contextlib.ExitStack() as held:
        of_workers = [held.enter_context(closing(_held_port(ports))) for _ in range(options.workers)]
        return await _serve_on(ports, of_workers, config, options, name)


def _held_port(taken: Sequence[int]) -> HeldPort:
    """Open a port for a worker, except the ports in `taken`. Raises ClusterError."""
    try:
        return HeldPort(LOOPBACK, taken)
    except OSError as error:
        raise ClusterError(
            f"cannot listen on a port for each worker ({error.strerror}); choose fewer `--workers`, or raise"
            " the limit on open files (`ulimit -n`)"
        ) from error


async def _serve_on(
    ports: Sequence[int],
    of_workers: Sequence[HeldPort],
    config: ServerConfig,
    options: ClusterOptions,
    name: str,
) -> int:
    """Run the cluster until a signal. `ports`: the router's port for clients, and its port for metrics."""
    port, metrics_port = ports
    options = replace(options, metrics_port=metrics_port)
    url = _url(config, port)
    supervisor = _supervisor(config, options, port, of_workers, url)
    stopping, hurried = _signals()
    starting = asyncio.create_task(supervisor.start())
    signalled = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({starting, signalled}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            _announce(_banner(options, url, name))
            await signalled
            logger.info("stopping once running requests have finished; a second signal stops at once")
    finally:
        starting.cancel()
        signalled.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await _stop(supervisor, hurried)
    return EXIT_FAILED if hurried.is_set() else EXIT_OK


async def _stop(supervisor: Supervisor, hurried: asyncio.Event) -> None:
    stopped = asyncio.create_task(supervisor.stop())
    hurry = asyncio.create_task(hurried.wait())
    await asyncio.wait({stopped, hurry}, return_when=asyncio.FIRST_COMPLETED)
    if not stopped.done():
        logger.warning("stopping at once: a second signal came before all requests had finished")
        supervisor.kill()
    hurry.cancel()
    await stopped


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Return two events: the first Ctrl-C or SIGTERM sets the first event, any later one the second."""
    first, second = asyncio.Event(), asyncio.Event()

    def handle() -> None:
        (second if first.is_set() else first).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, handle)
    return first, second


def _supervisor(
    config: ServerConfig, options: ClusterOptions, port: int, of_workers: Sequence[HeldPort], url: str
) -> Supervisor:
    ports = [held.port for held in of_workers]
    public = read_keys(config.http.api_key)
    admin = read_keys(config.http.admin_api_key)
    keys = Keys(
        public=tuple(public), admin=tuple(admin), worker=secrets.token_hex(), control=secrets.token_hex()
    )
    for danger in dangers(config, options.router, keys):
        logger.warning(danger)
    settings = worker_settings(config, ports, keys.of_workers, keys.admin)
    flags = router_flags(config, options, keys, port, ports)
    return Supervisor(
        [_worker(number, *each) for number, each in enumerate(zip(of_workers, settings, strict=True), 1)],
        _router(options, flags, f"{url}/readiness"),
        start_timeout_s=options.start_timeout_s,
        drain_s=config.http.shutdown_timeout,
        announce=_announce,
        show=_show if config.http.log_format == "text" else _show_unchanged,
    )


def _worker(number: int, held: HeldPort, settings: dict[str, Any]) -> Member:
    """Return a worker that gets its address on the command line, and all other settings and keys on stdin."""
    flags = ["--host", LOOPBACK, "--port", str(held.port), "--config", "/dev/stdin"]
    words = [PROGRAM, "worker", *map(str, held.fds), *flags]
    program = Program(f"worker {number}", words, settings, port=held)
    return Member(program, f"http://{LOOPBACK}:{held.port}/ready")


def _router(options: ClusterOptions, flags: Sequence[str], ready_url: str) -> Member:
    words = [PROGRAM, "router", PACKAGES[options.router]]
    return Member(Program("router", words, list(flags), logs_to_stdout=True), ready_url)


def _url(config: ServerConfig, port: int) -> str:
    """Return the router's URL for clients on this machine."""
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(config.http.host, config.http.host)
    scheme = "http" if config.http.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _banner(options: ClusterOptions, url: str, model: str) -> str:
    """Describe the running cluster, with example requests. They name the model, which smg requires."""
    body = json.dumps({"model": model, "prompt": "The capital of France is", "temperature": 0})
    return (
        f"Serving {model} at {url} with {options.workers} workers behind {options.router}"
        " (Ctrl-C stops it). Try:\n"
        f"  curl {url}/v1/completions -H 'Content-Type: application/json' \\\n    -d {shlex.quote(body)}\n"
        f"  curl {url}{METRICS_ROUTES[options.router]} http://{LOOPBACK}:{options.metrics_port}/metrics"
    )


def _port(text: str) -> int:
    if not 0 <= (number := int(text)) <= HIGHEST_PORT:
        raise argparse.ArgumentTypeError(f"it must lie in [0, {HIGHEST_PORT}]")
    return number


def _announce(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stdout is closed or has no reader
        print(visible(text), flush=True)


def _show(name: str, line: str) -> None:
    server_logging.write_line(visible(f"{name} | {line}"))


def _show_unchanged(name: str, line: str) -> None:
    """Write a JSON log line without a prefix, as the JSON names the program that logged it."""
    server_logging.write_line(visible(line))
