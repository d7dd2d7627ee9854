"""`shortfin-llm serve DIR` or `serve SOURCE`, also `python -m shortfin_apps.llm.server`.

A source is built first, unless the cache has it. The server itself is imported when its model is there, so
that a source is refused quickly.
"""

from __future__ import annotations

import argparse
import logging
import socket
import sys
from collections.abc import Sequence

from shortfin_apps.llm.cli import open_closed_streams
from shortfin_apps.llm.console import visible
from shortfin_apps.llm.contract.errors import LlmError, file_problem
from shortfin_apps.llm.serving.server import flags as server_flags
from shortfin_apps.llm.serving.server import logs as server_logging
from shortfin_apps.llm.serving.server.building import BuildFailed, built, fitted

logger = logging.getLogger(__name__)

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


DESCRIPTION = "Serves a model over HTTP: one that `shortfin-llm build` compiled, or a source, built first."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    server_flags.add_arguments(parser)


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
        config = fitted(built(config))
        from shortfin_apps.llm.serving.server.serve import serve

        return serve(config, listener)
    except BuildFailed as failure:  # the build has already reported the reason
        return failure.status
    finally:
        server_logging.flush()  # before the caller prints the reason for a failure


def main(argv: Sequence[str] | None = None, listener: socket.socket | None = None) -> int:
    open_closed_streams()
    parser = argparse.ArgumentParser(prog="python -m shortfin_apps.llm.server", description=__doc__)
    server_flags.add_arguments(parser)
    try:
        return run(parser.parse_args(argv), listener)
    except LlmError as error:
        print(visible(f"error: {error}"), file=sys.stderr)
        return EXIT_REFUSED
    except OSError as error:
        print(visible(f"error: {file_problem(error)}"), file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:  # before the server handles signals
        return EXIT_INTERRUPTED
