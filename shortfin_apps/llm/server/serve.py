"""Serves one model, in the order in which a user should see it.

The port opens at once, and `/ready` answers 503 while the model loads in a thread of its own. Ctrl-C or
SIGTERM refuses new requests, lets running ones finish, then closes the port; a second signal stops at once.
"""

from __future__ import annotations

import logging
import os
import sys

from shortfin_apps.llm.api.service import Service
from shortfin_apps.llm.components.frontend.metrics import ServerMetrics
from shortfin_apps.llm.errors import LlmError
from shortfin_apps.llm.server import open_files
from shortfin_apps.llm.server.config import ServerConfig, ServerConfigError
from shortfin_apps.llm.server.http_server import Server, bind, limits_of, url_of
from shortfin_apps.llm.server.model_loading import check_address_space, load_model, open_artifact, open_draft

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED = 0, 1
# Parts of the messages of Python's threads, IREE's threads and IREE's allocators.
OUT_OF_MEMORY_MESSAGES = ("can't start new thread", "thread creation failed", "RESOURCE_EXHAUSTED")


def serve(config: ServerConfig) -> int:
    """Serves until a signal; returns the exit status. Raises LlmError when it cannot start."""
    if config.log_level == "info":
        logging.getLogger("uvicorn").setLevel(logging.WARNING)  # it would repeat our own messages
    artifact, draft = open_artifact(config), open_draft(config)
    check_address_space([artifact, *([draft] if draft else ())], config)
    open_files.allow(config.limit_concurrency)
    name = config.served_model_name or artifact.name
    service = Service(
        name=name,
        metrics=ServerMetrics(name),
        config=config.model_dump(mode="json"),  # secrets as stars
        limits=limits_of(config),
        strict_fields=config.strict_fields,
        stream_keep_alive_s=config.stream_keep_alive or None,
    )
    server = Server(config, service, lambda: load_model(artifact, config, service.metrics, draft))
    sock = bind(config.host, config.port)
    logger.info("listening on %s, loading %s", url_of([sock], server.config.is_ssl), name)
    server.run(sockets=[sock])
    status = _exit_status(server)
    if server.leaves_thread:
        _exit_at_once(status)
    return status


def _exit_status(server: Server) -> int:
    if server.failure is None:
        return EXIT_FAILED if server.force_exit else EXIT_OK
    if isinstance(server.failure, LlmError):
        raise server.failure
    if _is_out_of_memory(server.failure):
        raise ServerConfigError(
            f"out of memory or threads while loading the model ({_first_line(server.failure)}); free some,"
            " raise the limits (`ulimit -v`, `ulimit -u`), or lower --pages or --threads"
        ) from server.failure
    logger.error("the model could not be loaded", exc_info=server.failure)
    return EXIT_FAILED


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(part in str(error) for part in OUT_OF_MEMORY_MESSAGES)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _exit_at_once(status: int) -> None:
    """Exits without running destructors, which are unsafe while a thread is inside a device library."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)
