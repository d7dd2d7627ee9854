"""An event loop in its own thread, which runs coroutines for threads without an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

from shortfin_apps.llm.contract.errors import UnavailableError

T = TypeVar("T")


class Work(Generic[T]):
    """A coroutine to run in the loop. The future `ended` gets its result or error when it has stopped."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        self.ended: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._loop = loop
        self._coroutine = coroutine
        self._task: asyncio.Task[T] | None = None

    def begin(self) -> None:
        """Start the coroutine. Callers must be in the loop's thread."""
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(self._settle)

    def cancel(self) -> None:
        """Cancel the coroutine, whether started or not, without waiting for its end. Thread-safe."""
        try:
            self._loop.call_soon_threadsafe(self._cancel)
        except RuntimeError:  # the loop is closed, so all work that was started has ended
            self.give_up()

    def give_up(self) -> None:
        """If the coroutine has not started, close it and set UnavailableError as its outcome."""
        if self._task is None and not self.ended.done():
            self._coroutine.close()
            self.ended.set_exception(UnavailableError("the model is closed"))

    def _cancel(self) -> None:
        if self._task is None:
            self.give_up()
        else:
            self._task.cancel()

    def _settle(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.ended.set_exception(UnavailableError("the model was closed before there was an answer"))
        elif (error := task.exception()) is not None:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(task.result())


class LoopThread:
    """Runs coroutines for any thread, in an event loop that is inside `context` while it runs."""

    def __init__(self, context: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        """Start the thread and wait until the context is entered. Raises the context's errors."""
        self._context = context
        self._started: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        self._stop = asyncio.Event()
        self._lock = threading.Lock()
        self._has_stopped = False
        self._thread = threading.Thread(target=self._main, name="offline", daemon=True)
        self._thread.start()
        self._loop = self._started.result()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and return its result.

        If the waiting thread gets an exception such as KeyboardInterrupt, the coroutine is cancelled and its
        end awaited. Raises UnavailableError if the loop has stopped, or stops before there is a result.
        """
        work = self.work(coroutine)
        try:
            self.begin(work)
            return work.ended.result()
        except BaseException:
            work.cancel()
            concurrent.futures.wait([work.ended])
            raise

    def work(self, coroutine: Coroutine[Any, Any, T]) -> Work[T]:
        """Wrap a coroutine without starting it.

        Callers must call `begin` within a `try` that cancels the work, as Ctrl-C may come at any time.
        """
        return Work(self._loop, coroutine)

    def begin(self, work: Work[T]) -> None:
        """Start the work. If the loop has stopped, the work's outcome is an UnavailableError."""
        with self._lock:
            if self._has_stopped:
                work.give_up()
            else:
                self._loop.call_soon_threadsafe(work.begin)

    def stop(self) -> None:
        """Cancel running work, leave the context and wait for the thread's end. Idempotent."""
        with contextlib.suppress(RuntimeError):  # already stopped
            self._loop.call_soon_threadsafe(self._stop.set)
        if threading.current_thread() is not self._thread:  # garbage collection may call `stop` in any thread
            self._thread.join()

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    async def _serve(self) -> None:
        async with self._context():
            self._started.set_result(asyncio.get_running_loop())
            await self._stop.wait()
            with self._lock:
                self._has_stopped = True
            await asyncio.sleep(0)  # start work that was queued earlier, so that it is cancelled below
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
