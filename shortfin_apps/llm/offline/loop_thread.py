"""An event loop in a thread of its own, for callers without one, or with one that must not be blocked."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

from shortfin_apps.llm.errors import UnavailableError

T = TypeVar("T")


class Work(Generic[T]):
    """A coroutine in the loop. `ended` has its outcome once nothing of it runs any more."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        self.ended: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._loop = loop
        self._coroutine = coroutine
        self._task: asyncio.Task[T] | None = None

    def begin(self) -> None:
        """In the loop."""
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(self._settle)

    def cancel(self) -> None:
        """Has it ended soon, from any thread, whether or not it has begun."""
        try:
            self._loop.call_soon_threadsafe(self._cancel)
        except RuntimeError:  # the loop is closed, and with it ended whatever had begun
            self.give_up()

    def give_up(self) -> None:
        """Ends it before it begins."""
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
    """Runs coroutines for any thread, within a context that is entered in the loop and left when it stops."""

    def __init__(self, context: Callable[[], AbstractAsyncContextManager[None]]) -> None:
        """Returns when the context is entered; raises what that raises."""
        self._context = context
        self._started: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        self._stop = asyncio.Event()
        self._lock = threading.Lock()
        self._has_stopped = False
        self._thread = threading.Thread(target=self._main, name="offline", daemon=True)
        self._thread.start()
        self._loop = self._started.result()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. An exception here, such as Ctrl-C, cancels it and waits for its end.

        Raises UnavailableError when the loop has stopped, or stops before there is a result.
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
        """The coroutine, which is still to `begin`, where an exception such as Ctrl-C is handled."""
        return Work(self._loop, coroutine)

    def begin(self, work: Work[T]) -> None:
        """Starts it; when the loop has stopped, its outcome is an UnavailableError."""
        with self._lock:
            if self._has_stopped:
                work.give_up()
            else:
                self._loop.call_soon_threadsafe(work.begin)

    def stop(self) -> None:
        """Cancels what runs, leaves the context, and returns when the thread has ended. Twice is a no-op."""
        with contextlib.suppress(RuntimeError):  # it has stopped
            self._loop.call_soon_threadsafe(self._stop.set)
        if threading.current_thread() is not self._thread:  # as where garbage is collected in it
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
            await asyncio.sleep(0)  # what was started before that begins
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
