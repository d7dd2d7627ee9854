"""Steps of a start: loader's thread, open files, warm-up's bar, first message; and the exit status."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import logging
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from shortfin_apps.llm.console import PlainConsole, visible
from shortfin_apps.llm.contract.errors import DeviceLostError, LlmError, OutOfDeviceMemoryError
from shortfin_apps.llm.serving.server.config import ServerConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def in_daemon_thread(function: Callable[[], T], name: str) -> T:
    """Run `function` in a daemon thread and return its result.

    With an executor's thread, the process could not exit before the thread has ended.
    """
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # the thread cannot be cancelled

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await asyncio.wrap_future(future)


NUM_OTHER_FILES = 128  # for the model, the libraries and the log


def allow_open_files(num_connections: int) -> None:
    """Raise the process's limit on open files if necessary; warn if the hard limit is too low.

    Beyond the limit, the server would close new connections without an error on either side.
    """
    wanted = num_connections + NUM_OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        logger.warning(
            "this process may open %d files, too few for %d connections: raise `ulimit -n`",
            allowed,
            num_connections,
        )


@contextmanager
def warm_up_progress(console: Console | None = None) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar; yield a function to call with the numbers of warmed-up and of all entries.

    The bar disappears when the context ends. Without a terminal, there is no bar.
    """
    console = console or PlainConsole(stderr=True)
    columns = (TextColumn("warming up"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


COLLECT_AFTER = 50_000  # new objects with references to others; Python's default is 700


def settled(loaded: T) -> T:
    """Make Python's garbage collections rare and short from now on; return what this process has loaded.

    While it loads, a process creates what it keeps until its end: modules, tokenizer, the engine. Later
    collections skip these objects. Requests leave no cyclic references, so collections find little.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)
    return loaded


def announce(name: str, url: str, *, has_chat: bool, logs_json: bool) -> None:
    """Print that the server is ready; with a JSON log, log this: stdout may be collected with the log."""
    if logs_json:
        logger.info("serving %s at %s", name, url)
    else:
        with contextlib.suppress(OSError, ValueError):  # standard output is closed or has no reader
            print(visible(_banner(name, url, has_chat)), flush=True)


def _banner(name: str, url: str, has_chat: bool) -> str:
    """Return the message with an example: a chat if the model has a chat template, else a completion."""
    route, body = "completions", '{"prompt": "The capital of France is", "temperature": 0}'
    if has_chat:
        question = '{"role": "user", "content": "What is the capital of France?"}'
        route, body = "chat/completions", '{"messages": [' + question + '], "temperature": 0}'
    return (
        f"Serving {name} at {url} (Ctrl-C stops it). Try:\n"
        f"  curl {url}/v1/{route} -H 'Content-Type: application/json' \\\n    -d '{body}'"
    )


EXIT_OK, EXIT_FAILED = 0, 1
EXIT_DEVICE_LOST = 75  # EX_TEMPFAIL of sysexits.h: start the server again
# Parts of error messages of Python's threads, IREE's threads and IREE's allocators.
OUT_OF_MEMORY_MESSAGES = ("can't start new thread", "thread creation failed", "RESOURCE_EXHAUSTED")


def exit_status_of(failure: Exception | None, *, was_forced: bool, is_lost: bool = False) -> int:
    """Return a stopped server's exit status. Raises LlmError.

    `failure` is why its model was not loaded; `is_lost`, that its engine was lost.
    """
    if is_lost:
        return EXIT_DEVICE_LOST
    if isinstance(failure, DeviceLostError) and not isinstance(failure, OutOfDeviceMemoryError):
        logger.critical(
            "the device was lost at the start: %s; exiting with status %d", failure, EXIT_DEVICE_LOST
        )
        return EXIT_DEVICE_LOST
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
