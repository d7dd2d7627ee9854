"""Draining: the period in which a stopping server lets its requests finish."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shortfin_apps.llm.contract.errors import RequestAbortedError, UnavailableError
from shortfin_apps.llm.serving.frontend.open_requests import OpenRequests


class Draining:
    """Tracks whether requests are still accepted. `abort_all` aborts every one of `requests`."""

    def __init__(self, requests: OpenRequests, abort_all: Callable[[], object]) -> None:
        self._requests = requests
        self._abort_all = abort_all
        self.has_begun = False
        self._is_over = False  # the timeout has passed: calls that resume are aborted, too

    def begin(self) -> None:
        """Refuses new requests from now on; calls that resume are still accepted."""
        self.has_begun = True

    def check(self, resumes: bool) -> None:
        """Raises UnavailableError for a new request, and RequestAbortedError after the timeout."""
        if self.has_begun and not resumes:
            raise UnavailableError("the server is not taking requests: it is starting or shutting down")
        if self._is_over:
            raise RequestAbortedError("the server is shutting down and cannot wait for this request's end")

    async def drain(self, timeout_s: float) -> None:
        """Waits until all requests have ended; aborts the remaining ones after `timeout_s`."""
        self.begin()
        try:
            async with asyncio.timeout(timeout_s):
                await self._requests.until_none_left()
        except TimeoutError:
            self._is_over = True
            self._abort_all()
            await self._requests.until_none_left()
