"""The HTTP server: opens the port, then loads the model, and drains before it stops."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import math
import socket
from collections.abc import Callable, Sequence
from types import FrameType

import uvicorn

from shortfin_apps.llm.serving.api.app import create_app, refusal
from shortfin_apps.llm.serving.api.service import Service
from shortfin_apps.llm.serving.frontend.async_engine import AsyncEngine
from shortfin_apps.llm.serving.server.config import ServerConfig, ServerConfigError
from shortfin_apps.llm.serving.server.device_loss import wind_up
from shortfin_apps.llm.serving.server.flight_recorder import dump_at_signal
from shortfin_apps.llm.serving.server.keys import key_ring, no_certificate
from shortfin_apps.llm.serving.server.model_loading import Loaded, RunningEngine
from shortfin_apps.llm.serving.server.protocol import bounded
from shortfin_apps.llm.serving.server.start_up import announce, in_daemon_thread

logger = logging.getLogger(__name__)

BACKLOG = 2048
KEEP_ALIVE_S = 75  # of an idle connection, as in nginx: no client pool keeps a connection longer
SEND_TIMEOUT_S = 30.0  # after which a client that does not read its answer is disconnected
MAX_CONNECTIONS = 4096  # of one process: 8 times the requests that a server with default limits admits
GRACE_S = 5  # added to the drain, so that the answers of aborted requests reach their clients
LAST_STEP_S = 1  # maximum time that a forced stop waits for the engine's current step
POLL_S = 0.1
STOPPING = "stopping once running requests have finished; a second signal stops at once"
STOPPING_AT_ONCE = "stopping at once: a second signal came before all requests had finished"


class Server(uvicorn.Server):
    """uvicorn's server for a model that `load` returns; `load` runs in its own thread.

    If `announces` is False, another process announces start and stop. If `loads_first` is True, the server
    listens only after the model is loaded: other processes accept the port's connections until then.
    """

    def __init__(
        self,
        config: ServerConfig,
        service: Service,
        load: Callable[[], Loaded],
        *,
        announces: bool = True,
        loads_first: bool = False,
    ) -> None:
        super().__init__(http_config(config, service))
        self.failure: Exception | None = None  # why the model could not be loaded
        self.is_lost = False  # the engine is lost, and this process has to end
        self._drain_delay_s = config.http.drain_delay
        self._handshake_timeout_s = config.http.read_timeout
        self._shutdown_timeout_s = config.http.shutdown_timeout
        self._announces = announces
        self._loads_first = loads_first
        self._logs_json = config.http.log_format == "json"  # stdout may be collected as a log, too
        self._service = service
        self._load = load
        self._loading: asyncio.Task[None] | None = None
        self._engine: RunningEngine | None = None
        self._engine_closed = True
        self._losing: asyncio.Task[None] | None = None

    @property
    def serves(self) -> bool:
        """Whether the model is loaded."""
        return self._engine is not None

    @property
    def leaves_thread(self) -> bool:
        """Whether shutdown left the loader's or engine's thread running, inside a device library."""
        return (self.failure is None and self._engine is None) or not self._engine_closed

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to load and listen, with a time limit of TLS handshakes, which uvicorn's `startup` lacks."""
        assert sockets, "the port is bound before anything is loaded"
        self._loading = asyncio.create_task(self._load_in_background(sockets))
        if self._loads_first:
            await asyncio.wait({self._loading})
        loop, tls = asyncio.get_running_loop(), self.config.ssl
        timeout_s = None if tls is None else self._handshake_timeout_s
        self.servers = [
            await loop.create_server(
                self._protocol, sock=sock, ssl=tls, backlog=BACKLOG, ssl_handshake_timeout=timeout_s
            )
            for sock in sockets
        ]
        self.started = True
        dump_at_signal(lambda: self._engine)

    def _protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._loading is not None:
            self._loading.cancel()
        stopping = asyncio.create_task(self._drain_and_stop(sockets))
        while not stopping.done() and not self.force_exit:
            await asyncio.wait({stopping}, timeout=POLL_S)
        if not stopping.done():
            if self._announces:
                logger.warning(STOPPING_AT_ONCE)
            stopping.cancel()
            await asyncio.gather(stopping, return_exceptions=True)
            self._close_port(sockets)
        if self.is_lost and self._losing is not None and not self.force_exit:
            await asyncio.wait({self._losing})
        if self.is_lost:
            self._engine_closed = False  # it may wait for its driver for ever
        elif self._engine is not None:
            self._engine_closed = await close_engine(self._engine, lambda: self.force_exit)
        await self._abort_connections()
        if not stopping.cancelled():
            stopping.result()  # raises its error, if any

    async def _drain_and_stop(self, sockets: list[socket.socket] | None) -> None:
        """Drain with the port still open, so that new clients get a 503 instead of a refused connection."""
        self._service.stopping = True
        if self._engine is not None:
            if self._announces and not self.is_lost:
                logger.info(STOPPING)
            await asyncio.sleep(0 if self.is_lost else self._drain_delay_s)
        clock = asyncio.get_running_loop().time
        give_up_s = clock() + self._shutdown_timeout_s + GRACE_S
        await self._drain()
        self._close_port(sockets)
        await asyncio.sleep(POLL_S)  # requests already received on kept-alive connections are answered first
        self.config.timeout_graceful_shutdown = max(GRACE_S, math.ceil(give_up_s - clock()))
        await super().shutdown(sockets)

    async def _drain(self) -> None:
        if self._engine is None:
            return
        try:
            drained = self._engine.drain(self._shutdown_timeout_s)
            await asyncio.wait_for(drained, self._shutdown_timeout_s + GRACE_S)
        except TimeoutError:
            logger.warning("the engine did not end its requests in time; stopping without them")

    async def _abort_connections(self) -> None:
        """End connections that remain after the engine is closed: their clients do not read answers."""
        tasks, connections = self.server_state.tasks, self.server_state.connections
        if tasks:
            await asyncio.wait(tasks, timeout=POLL_S)
        if tasks:
            logger.warning("%d requests are cut off without an answer", len(tasks))
        for connection in list(connections):
            connection.transport.abort()
        if tasks:
            await asyncio.wait(tasks, timeout=POLL_S)

    def _close_port(self, sockets: Sequence[socket.socket] | None) -> None:
        for server in self.servers:
            server.close()
        for sock in sockets or ():
            sock.close()

    async def _load_in_background(self, sockets: Sequence[socket.socket]) -> None:
        try:
            loaded = await in_daemon_thread(self._load, "model loader")
            loaded.engine.start()
        except Exception as error:
            self.failure, self.should_exit = error, True
            return
        self._engine = loaded.engine
        if isinstance(loaded.engine, AsyncEngine):
            self._losing = asyncio.create_task(self._end_when_lost(loaded.engine))
        self._service.serve(loaded.model)
        if self._announces:
            url = url_of(sockets, self.config.is_ssl)
            has_chat = loaded.model.generator.tokenizer.has_chat_template
            announce(self._service.name, url, has_chat=has_chat, logs_json=self._logs_json)

    async def _end_when_lost(self, engine: AsyncEngine) -> None:
        reason = await engine.until_lost()
        self.is_lost = True
        await wind_up(engine, reason)
        self.should_exit = True


async def close_engine(engine: RunningEngine, is_forced: Callable[[], bool]) -> bool:
    """Close the engine after its current step; once the stop is forced, wait LAST_STEP_S at most.

    Returns False if the engine's thread is still running the step.
    """
    closing = asyncio.ensure_future(engine.close())
    while not closing.done() and not is_forced():
        await asyncio.wait({closing}, timeout=POLL_S)
    if closing.done():
        return closing.result()
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    return await engine.close(LAST_STEP_S)


def http_config(config: ServerConfig, service: Service) -> uvicorn.Config:
    """Return uvicorn's settings for `service`. Raises ServerConfigError for invalid keys or certificates."""
    keys = key_ring(config)
    http = uvicorn.Config(
        create_app(
            service,
            root_path=config.http.root_path,
            keys=keys,
            cors_origins=config.http.cors_origin,
        ),
        http=bounded(
            read_timeout_s=config.http.read_timeout,
            send_timeout_s=SEND_TIMEOUT_S,
            max_body_bytes=config.requests.max_body_bytes,
            max_connections=MAX_CONNECTIONS,
            refuse=refusal(
                f"the server has its {MAX_CONNECTIONS} connections; try again",
                service.metrics.clock,
            ),
        ),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,  # serving/http/access_log.py logs more, but no query strings
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        ssl_certfile=config.http.ssl_certfile,
        ssl_keyfile=config.http.ssl_keyfile,
    )
    try:
        http.load()
    except OSError as error:
        raise no_certificate(error) from error
    return http


def warn_if_open(config: ServerConfig) -> None:
    """Warn if anyone can reach the server without a key. Raises ServerConfigError for invalid keys."""
    if not (key_ring(config).required or _is_loopback(config.http.host)):
        logger.warning("anyone who can reach %s may use this server: set an --api-key", config.http.host)


def bind(host: str, port: int) -> socket.socket:
    """Open a listening socket, before loading, so that a port in use is reported early.

    Raises ServerConfigError.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ServerConfigError(
                f"port {port} is in use; stop the program that uses it or choose another --port"
            ) from None
        reason = (error.strerror or str(error)).partition(" (while ")[0]  # then the address again
        raise ServerConfigError(
            f"cannot listen on {host}, port {port} ({reason}); give an address of this machine as --host, "
            "and a --port that you may use"
        ) from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def url_of(sockets: Sequence[socket.socket], is_tls: bool) -> str:
    host, port = sockets[0].getsockname()[:2]
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
