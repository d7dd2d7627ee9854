"""Runs work in a thread that does not delay the process's exit."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

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
