"""Steps of a start: the loader's thread, the limit on open files, the warm-up's bar, the first message."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from shortfin_apps.llm.console import PlainConsole, visible

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Run `function` in a daemon thread. An executor's thread would have to end before the process can."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # it cannot be cancelled while the thread runs

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="model loader", daemon=True).start()
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
    """Yield a function to call with the number of warmed-up entries and of all entries.

    The bar disappears when the context ends; it is not shown without a terminal.
    """
    console = console or PlainConsole(stderr=True)
    columns = (TextColumn("warming up"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def announce(name: str, url: str, *, has_chat: bool, logs_json: bool) -> None:
    """Print the message, or log it if the log is JSON, as stdout may be collected with the log."""
    if logs_json:
        logger.info("serving %s at %s", name, url)
    else:
        with contextlib.suppress(OSError, ValueError):  # standard output is closed or has no reader
            print(visible(_banner(name, url, has_chat)), flush=True)


def _banner(name: str, url: str, has_chat: bool) -> str:
    """Return the message with a chat if the model has a chat template, else with a completion."""
    route, body = "completions", '{"prompt": "The capital of France is", "temperature": 0}'
    if has_chat:
        question = '{"role": "user", "content": "What is the capital of France?"}'
        route, body = "chat/completions", '{"messages": [' + question + '], "temperature": 0}'
    return (
        f"Serving {name} at {url} (Ctrl-C stops it). Try:\n"
        f"  curl {url}/v1/{route} -H 'Content-Type: application/json' \\\n    -d '{body}'"
    )
