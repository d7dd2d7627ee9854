"""`shortfin-llm serve DIR` or `serve SOURCE`, also `python -m shortfin_apps.llm.server`.

A source is built first, unless the cache has it. The server itself is imported when its model is there, so
that a source is refused quickly.
"""

from __future__ import annotations

import argparse
import logging
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shortfin_apps.llm.cli import Parser, status_of
from shortfin_apps.llm.serving.server import flags as server_flags
from shortfin_apps.llm.serving.server import logs as server_logging
from shortfin_apps.llm.serving.server.building import BuildFailed, built, fitted, is_source
from shortfin_apps.llm.serving.server.config import ServerConfig
from shortfin_apps.llm.serving.server.keys import with_keys

if TYPE_CHECKING:
    from shortfin_apps.llm.serving.server.life_signs import LifeSigns

logger = logging.getLogger(__name__)

DESCRIPTION = "Serves a model over HTTP: one that `shortfin-llm build` compiled, or a source, built first."


RESTART_HELP = (
    "start the server again, in a new process on the same port, when its GPU hangs or is lost; without this "
    "flag it exits with status 75, for systemd or Kubernetes to start it again (docs/overload.md)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    server_flags.add_arguments(parser)
    # A flag of this command, not a setting: it is not the server that does it, but a process around it.
    parser.add_argument("--restart-on-device-loss", action="store_true", help=RESTART_HELP)
    parser.add_argument("--restart_on_device_loss", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace, listener: socket.socket | None = None) -> int:
    """Serve until a signal; return the exit status. Raises LlmError if the server cannot start.

    `listener` is a bound socket to use instead of the settings' address.
    """
    notes: list[str] = []
    config = server_flags.from_arguments(args, notes.append)
    server_logging.set_up(config.http.log_level, config.http.log_format)
    for note in notes:  # collected before the log was set up
        logger.warning(note)
    try:
        return _keep_serving(config, listener) if args.restart_on_device_loss else served(config, listener)
    finally:
        server_logging.flush()  # before the caller prints the reason for a failure


def served(config: ServerConfig, listener: socket.socket | None, signs: LifeSigns | None = None) -> int:
    """Build the model if it is a source, and serve it in this process; see `serve`. Raises LlmError."""
    config = with_keys(config)
    if listener is None and config.model.artifact is not None and is_source(config.model.artifact):
        from shortfin_apps.llm.serving.server.http_server import bind

        bind(config.http.host, config.http.port).close()  # before a build, which may take minutes
    try:
        config = fitted(built(config))  # it may load the GPU's driver, to know the chip
    except BuildFailed as failure:  # the build has already reported the reason
        return failure.status
    from shortfin_apps.llm.serving.server.serve import serve

    return serve(config, listener, signs)


def _keep_serving(config: ServerConfig, listener: socket.socket | None) -> int:
    from shortfin_apps.llm.serving.server.http_server import bind
    from shortfin_apps.llm.serving.server.restarts import keep_serving

    return keep_serving(config, listener or bind(config.http.host, config.http.port))


def main(argv: Sequence[str] | None = None, listener: socket.socket | None = None) -> int:
    parser = Parser(prog="python -m shortfin_apps.llm.server", description=__doc__)
    add_arguments(parser)
    return status_of(lambda: run(parser.parse_args(argv), listener))
