"""A server's exit status, or the error that explains why it could not start."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

from shortfin_apps.llm.contract.errors import LlmError
from shortfin_apps.llm.serving.server.config import ServerConfigError

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED = 0, 1
# Parts of error messages of Python's threads, IREE's threads and IREE's allocators.
OUT_OF_MEMORY_MESSAGES = ("can't start new thread", "thread creation failed", "RESOURCE_EXHAUSTED")


def exit_status_of(failure: Exception | None, *, was_forced: bool) -> int:
    """Return a stopped server's exit status; `failure` is why its model was not loaded. Raises LlmError."""
    if failure is None:
        return EXIT_FAILED if was_forced else EXIT_OK
    if isinstance(failure, LlmError):
        raise failure
    if _is_out_of_memory(failure):
        raise ServerConfigError(
            f"out of memory or threads while loading the model ({_first_line(failure)}); free some,"
            " raise the limits (`ulimit -v`, `ulimit -u`), or lower --pages or --threads"
        ) from failure
    logger.error("the model could not be loaded", exc_info=failure)
    return EXIT_FAILED


def exit_with_thread(status: int) -> NoReturn:
    """Exit without running destructors, which are unsafe while a thread is inside a device library."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(part in str(error) for part in OUT_OF_MEMORY_MESSAGES)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
