"""A server polled for its metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from shortfin_apps.llm.client import LlmClient
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.terminal.top.figures import Figures, figures_of, is_same_process
from shortfin_apps.llm.terminal.top.reading import Reading, parsed


class WatchedServer:
    """Reads figures; `info` is `/server_info`, empty before the first reading or if there is none."""

    def __init__(self, client: LlmClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._last: Reading | None = None
        self.info: Mapping[str, Any] = {}

    @property
    def url(self) -> str:
        return self._client.base_url

    async def read(self) -> Figures:
        """Return the figures since the last reading of the same process. Raises LlmError."""
        reading = parsed(await self._metrics(), self._clock())
        if self._last is None or not is_same_process(self._last, reading):
            self._last = None
            self.info = await self._server_info()
        figures = figures_of(self._last, reading)
        self._last = reading
        return figures

    async def _metrics(self) -> str:
        try:
            return await self._client.metrics()
        except InvalidRequestError as error:
            raise InvalidRequestError(
                f"the server at {self.url} has no /metrics to watch ({error})"
            ) from error

    async def _server_info(self) -> Mapping[str, Any]:
        try:
            return await self._client.server_info()
        except InvalidRequestError:  # another kind of server, without this route
            return {}
