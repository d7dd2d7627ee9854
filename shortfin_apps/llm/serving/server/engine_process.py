"""The main process with `--api-processes`: runs the engine and starts the API processes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import uvicorn

from shortfin_apps.llm.serving.engine_link.api_links import ApiLinks
from shortfin_apps.llm.serving.frontend.async_engine import AsyncEngine
from shortfin_apps.llm.serving.server.api_process import ApiProcessOptions
from shortfin_apps.llm.serving.server.api_processes import ApiProcesses, api_process_command
from shortfin_apps.llm.serving.server.config import ServerConfig
from shortfin_apps.llm.serving.server.device_loss import wind_up
from shortfin_apps.llm.serving.server.flight_recorder import dump_at_signal
from shortfin_apps.llm.serving.server.http_server import (
    GRACE_S,
    STOPPING,
    STOPPING_AT_ONCE,
    close_engine,
    url_of,
)
from shortfin_apps.llm.serving.server.model_loading import LoadedEngine
from shortfin_apps.llm.serving.server.start_up import announce, in_daemon_thread

logger = logging.getLogger(__name__)

T = TypeVar("T")

# After this time, a thread that computes lets another have Python's lock (Python's default: 5 ms). The thread
# that launches invocations needs the lock several times per launch, while the engine's thread plans or
# commits.
SWITCH_INTERVAL_S = 0.0005


class EngineProcess:
    """Runs the engine that `load` returns, and API processes; has the same interface as Server.

    Each API process is started as `python -m MODULE`. Signals are passed on to the API processes: each drains
    as Server does, and the engine is closed after all of them have ended.
    """

    def __init__(
        self,
        config: ServerConfig,
        name: str,
        load: Callable[[], LoadedEngine],
        module: str = "shortfin_apps.llm.serving.server.api_process",
    ) -> None:
        self.failure: Exception | None = None  # why the server cannot serve
        self.force_exit = False
        self.is_lost = False  # the engine is lost, and this process has to end
        self._config = config
        self._name = name
        self._load = load
        self._module = module
        self._engine: AsyncEngine | None = None
        self._engine_closed = True
        self._losing: asyncio.Task[None] | None = None
        self._is_loading = False

    @property
    def serves(self) -> bool:
        """Whether the model is loaded."""
        return self._engine is not None

    @property
    def leaves_thread(self) -> bool:
        """Whether the loader's or the engine's thread is still running, inside a device library."""
        return self._is_loading or not self._engine_closed

    def run(self, sockets: Sequence[socket.socket]) -> None:
        """Serve on the only socket of `sockets` until a signal, and close the socket."""
        [listener] = sockets
        loop_factory = uvicorn.Config(app="", log_config=None).get_loop_factory()  # the same as Server's
        with listener, _prompt_switches(), asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(self._run(listener))

    async def _run(self, listener: socket.socket) -> None:
        self._stopping = asyncio.Event()
        self._links = ApiLinks()
        options = ApiProcessOptions(config=self._config, name=self._name, engine_pid=os.getpid())
        command = api_process_command(self._module)
        self._processes = ApiProcesses(self._links, listener, command, options, self._config.api_processes)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        dump_at_signal(lambda: self._engine)
        try:
            await self._serve(listener)
        except Exception as error:
            self.failure = error
        await self._shut_down()

    async def _serve(self, listener: socket.socket) -> None:
        """Serve until a signal. Raises errors that prevent serving."""
        await self._processes.start()
        self._is_loading = True
        loaded = await self._unless_stopped(in_daemon_thread(self._load, "model loader"))
        if loaded is None:
            return
        self._is_loading = False
        self._engine = loaded.engine
        loaded.engine.start()
        self._losing = asyncio.create_task(self._end_when_lost(loaded.engine))
        await self._unless_stopped(self._links.serve(loaded.engine, loaded.grammars))
        if not self._stopping.is_set():
            url = url_of([listener], self._config.http.ssl_certfile is not None)
            logs_json = self._config.http.log_format == "json"
            announce(self._name, url, has_chat=loaded.has_chat, logs_json=logs_json)
        await self._stopping.wait()

    async def _unless_stopped(self, work: Awaitable[T]) -> T | None:
        """Return the result of `work`, or None after a signal. Raises if an API process could not start."""
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({working, stopping, self._processes.failed}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if self._processes.failed.done():
            self._processes.failed.result()
        return working.result() if working.done() else None

    async def _shut_down(self) -> None:
        if not self._stopping.is_set():  # stopping because of an error, not a signal
            self._processes.signal()
        drain_s = self._config.http.drain_delay + self._config.http.shutdown_timeout
        await self._processes.until_ended(drain_s + 3 * GRACE_S)
        self._links.close()
        if self.is_lost and self._losing is not None and not self.force_exit:
            await asyncio.wait({self._losing})
        if self.is_lost:
            self._engine_closed = False  # it may wait for its driver for ever
        elif self._engine is not None:
            self._engine_closed = await close_engine(self._engine, lambda: self.force_exit)

    async def _end_when_lost(self, engine: AsyncEngine) -> None:
        reason = await engine.until_lost()
        self.is_lost = True
        await wind_up(engine, reason)
        for _ in range(2):  # there is nothing to drain
            self._processes.signal()
        self._stopping.set()

    def _on_signal(self) -> None:
        self.force_exit = self._stopping.is_set()
        logger.log(*((logging.WARNING, STOPPING_AT_ONCE) if self.force_exit else (logging.INFO, STOPPING)))
        self._stopping.set()
        self._processes.signal()


@contextmanager
def _prompt_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
