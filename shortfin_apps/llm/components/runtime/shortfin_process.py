"""The process on a shortfin device's worker that starts its calls one by one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Future
from typing import Any

import shortfin as sf

from shortfin_apps.llm.components.runtime.device_errors import TimelineError


class Call(sf.Message):  # type: ignore[misc]
    """Work that the process starts; `start` should wait for the device only if necessary."""

    def __init__(self, start: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self.start = start


class Process(sf.Process):  # type: ignore[misc]
    """Runs calls in the order in which they were queued, until the queue is closed."""

    def __init__(self, reader: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._reader = reader
        self.ended: Future[None] = Future()

    async def run(self) -> None:
        try:
            while (call := await self._reader()) is not None:
                await call.start()
                del call
        finally:
            self.ended.set_result(None)


class Completion:
    """An awaitable that completes when all work submitted to the device so far has completed."""

    def __init__(self, device: Any) -> None:
        self._iterator = device.__await__()  # fixes the point of the timeline now, not when awaited

    def __await__(self) -> Generator[Any, None, None]:
        try:
            yield from self._iterator
        except Exception as error:
            raise TimelineError(str(error)) from error
