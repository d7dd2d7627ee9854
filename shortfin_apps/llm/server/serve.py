"""`shortfin-llm serve DIR`, also `python -m shortfin_apps.llm.server`.

The port opens at once, and `/ready` answers 503 while the model loads behind it in a thread of its own.
Ctrl-C or SIGTERM lets running requests finish and refuses others, and then closes the port; a second one
stops at once.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import dataclasses
import errno
import ipaddress
import logging
import math
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Protocol, TypeVar

import uvicorn

from shortfin_apps.llm import address_space
from shortfin_apps.llm.api.app import create_app, refusal
from shortfin_apps.llm.api.auth import KeyRing
from shortfin_apps.llm.api.limits import Limits
from shortfin_apps.llm.api.sampling import SamplingDefaults
from shortfin_apps.llm.api.service import ServedModel, Service
from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.artifact.verification import verifying
from shortfin_apps.llm.components.frontend.beam_search import check_num_beams
from shortfin_apps.llm.components.frontend.engine_client import EngineClient
from shortfin_apps.llm.components.frontend.metrics import ServerMetrics
from shortfin_apps.llm.components.frontend.text_generation import TextGenerator
from shortfin_apps.llm.components.text.tokenizer import Tokenizer, read_json_object
from shortfin_apps.llm.errors import ArtifactError, InvalidRequestError, LlmError
from shortfin_apps.llm.server import config as server_config
from shortfin_apps.llm.server import flags as server_flags
from shortfin_apps.llm.server import logs as server_logging
from shortfin_apps.llm.server import open_files
from shortfin_apps.llm.server.config import ServerConfig, ServerConfigError
from shortfin_apps.llm.server.protocol import bounded

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED, EXIT_REFUSED = 0, 1, 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
BACKLOG = 2048
LAST_WORDS_S = 5  # beyond the drain, for aborted answers to reach their clients
LAST_STEP_S = 1  # for the step under way to end, after a second signal
POLL_S = 0.1
# What Python's threads, IREE's and its allocators say in their errors.
WANT_OF_MEMORY = ("can't start new thread", "thread creation failed", "RESOURCE_EXHAUSTED")

T = TypeVar("T")


class RunningEngine(EngineClient, Protocol):
    """An engine with its thread, made outside the event loop and started inside it."""

    def start(self) -> None: ...

    async def close(self, patience_s: float = ...) -> bool: ...


@dataclass(frozen=True, slots=True)
class Loaded:
    model: ServedModel
    engine: RunningEngine


class Server(uvicorn.Server):
    """uvicorn over a model that `load` brings; `load` runs in a thread and may take its time."""

    def __init__(self, config: ServerConfig, service: Service, load: Callable[[], Loaded]) -> None:
        super().__init__(http_config(config, service))
        self.failure: Exception | None = None  # why the model could not be loaded
        self._drain_delay_s = config.drain_delay
        self._handshake_timeout_s = config.read_timeout
        self._shutdown_timeout_s = config.shutdown_timeout
        self._speaks_json = config.log_format == "json"  # then stdout is somebody's log as well
        self._service = service
        self._load = load
        self._loading: asyncio.Task[None] | None = None
        self._engine: RunningEngine | None = None
        self._engine_closed = True

    @property
    def leaves_thread(self) -> bool:
        """The loader or the engine was left behind in its thread, inside a device library."""
        return (self.failure is None and self._engine is None) or not self._engine_closed

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, which does not bound the time of a TLS handshake."""
        assert sockets, "the port is bound before anything is loaded"
        loop, tls = asyncio.get_running_loop(), self.config.ssl
        timeout_s = None if tls is None else self._handshake_timeout_s
        self.servers = [
            await loop.create_server(
                self._protocol, sock=sock, ssl=tls, backlog=BACKLOG, ssl_handshake_timeout=timeout_s
            )
            for sock in sockets
        ]
        self.started = True
        self._loading = asyncio.create_task(self._load_behind(sockets))

    def _protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._loading is not None:
            self._loading.cancel()
        leaving = asyncio.create_task(self._leave(sockets))
        while not leaving.done() and not self.force_exit:
            await asyncio.wait({leaving}, timeout=POLL_S)
        if not leaving.done():
            logger.warning("stopping at once: a second signal came before all requests had finished")
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            self._close_port(sockets)
        if self._engine is not None:
            patience_s = LAST_STEP_S if self.force_exit else math.inf
            self._engine_closed = await self._engine.close(patience_s)
        await self._cut_off()
        if not leaving.cancelled():
            leaving.result()  # raises what went wrong

    async def _leave(self, sockets: list[socket.socket] | None) -> None:
        """The port stays open while the server drains, so that who comes is told 503 and not refused."""
        self._service.leaving = True
        if self._engine is not None:
            logger.info("stopping once running requests have finished; a second signal stops at once")
            await asyncio.sleep(self._drain_delay_s)
        clock = asyncio.get_running_loop().time
        give_up_s = clock() + self._shutdown_timeout_s + LAST_WORDS_S
        await self._drain()
        self._close_port(sockets)
        await asyncio.sleep(POLL_S)  # what has been sent on a kept connection is answered before it is closed
        self.config.timeout_graceful_shutdown = max(LAST_WORDS_S, math.ceil(give_up_s - clock()))
        await super().shutdown(sockets)

    async def _drain(self) -> None:
        if self._engine is None:
            return
        try:
            drained = self._engine.drain(self._shutdown_timeout_s)
            await asyncio.wait_for(drained, self._shutdown_timeout_s + LAST_WORDS_S)
        except TimeoutError:
            logger.warning("the engine did not let go of its requests; stopping without them")

    async def _cut_off(self) -> None:
        """Ends what is left when the engine is gone: clients that do not take their last words."""
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

    async def _load_behind(self, sockets: Sequence[socket.socket]) -> None:
        try:
            loaded = await _in_daemon_thread(self._load)
            loaded.engine.start()
        except Exception as error:
            self.failure, self.should_exit = error, True
            return
        self._engine = loaded.engine
        self._service.serve(loaded.model)
        url = _url(sockets, self.config.is_ssl)
        if self._speaks_json:
            logger.info("serving %s at %s", self._service.name, url)
        else:
            has_chat = loaded.model.generator.tokenizer.has_chat_template
            print(_banner(self._service.name, url, has_chat), flush=True)


def http_config(config: ServerConfig, service: Service) -> uvicorn.Config:
    """How uvicorn is to serve `service`. Raises ServerConfigError for keys or certificates that are none."""
    keys = KeyRing(
        server_config.read_keys(config.api_key, config.api_key_file),
        server_config.read_keys(config.admin_api_key, config.admin_api_key_file),
    )
    password = config.ssl_keyfile_password
    http = uvicorn.Config(
        create_app(service, root_path=config.root_path, keys=keys, cors_origins=config.cors_origin),
        http=bounded(
            read_timeout_s=config.read_timeout,
            send_timeout_s=config.send_timeout,
            max_body_bytes=config.max_body_bytes,
            max_connections=config.limit_concurrency,
            refuse=refusal(
                f"the server has its {config.limit_concurrency} connections (--limit-concurrency); try again",
                service.metrics.clock,
            ),
        ),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,  # api/access_log.py says more, and no query
        server_header=False,
        timeout_keep_alive=config.timeout_keep_alive,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        ssl_keyfile_password=None if password is None else password.get_secret_value(),
    )
    try:
        http.load()
    except OSError as error:  # ssl.SSLError is one
        raise ServerConfigError(
            f"--ssl-certfile, --ssl-keyfile: not a certificate and its key ({error})"
        ) from error
    if not (keys.asks or _is_loopback(config.host)):
        logger.warning("anyone who reaches %s may use this server: give it an --api-key", config.host)
    return http


def limits_of(config: ServerConfig) -> Limits:
    """The settings `max_...` that bound one request."""
    names = (field.name for field in dataclasses.fields(Limits))
    return Limits(**{name: getattr(config, f"max_{name}") for name in names})


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand `serve`."""
    description = "Serves a model that `shortfin-llm build` compiled, over HTTP."
    parser = subparsers.add_parser("serve", help="serve a compiled model over HTTP", description=description)
    server_flags.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serves until a signal; returns the exit status. Raises LlmError when it cannot start."""
    notes: list[str] = []
    config = server_flags.from_arguments(args, notes.append)
    server_logging.set_up(config.log_level, config.log_format)
    for note in notes:  # what was read before there was a log to tell it to
        logger.warning(note)
    try:
        return _serve(config)
    finally:
        server_logging.flush()  # before the reason for a failure is said


def _serve(config: ServerConfig) -> int:
    if config.log_level == "info":
        logging.getLogger("uvicorn").setLevel(logging.WARNING)  # it would announce what we announce
    artifact = open_artifact(config)
    _check_room(artifact, config)
    open_files.allow(config.limit_concurrency)
    name = config.served_model_name or artifact.name
    service = Service(
        name=name,
        metrics=ServerMetrics(name),
        config=config.model_dump(mode="json"),  # secrets as stars
        limits=limits_of(config),
        strict_fields=config.strict_fields,
    )
    server = Server(config, service, lambda: load_model(artifact, config, service.metrics))
    sock = bind(config.host, config.port)
    logger.info("listening on %s, loading %s", _url([sock], server.config.is_ssl), name)
    server.run(sockets=[sock])
    status = _exit_status(server)
    if server.leaves_thread:
        _abandon_thread(status)
    return status


def open_artifact(config: ServerConfig) -> Artifact:
    """The model directory, or the loose files of upstream's flags. Raises ArtifactError."""
    if config.artifact is not None:
        return Artifact.open(config.artifact, check_sizes=config.verify != "none")
    assert config.vmfb is not None, "ServerConfig saw to it"
    assert config.model_config_json is not None, "ServerConfig saw to it"
    assert config.tokenizer_json is not None, "ServerConfig saw to it"
    return Artifact.from_files(
        vmfb=config.vmfb,
        parameters=config.parameters,
        model_config=config.model_config_json,
        tokenizer_json=config.tokenizer_json,
        tokenizer_config_json=config.tokenizer_config_json,
        check_sizes=config.verify != "none",
    )


def _check_room(artifact: Artifact, config: ServerConfig) -> None:
    """Raises AddressSpaceError when the model cannot be loaded under this process's limit."""
    file_bytes = sum(path.stat().st_size for path in (artifact.vmfb, *artifact.parameters))
    num_workers = config.threads or len(os.sched_getaffinity(0))
    address_space.check_more(address_space.model_bytes(file_bytes, num_workers))


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, so that a port in use is known before anything is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ServerConfigError(
                f"port {port} is in use; stop what uses it or give another --port"
            ) from None
        raise ServerConfigError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from None


def load_model(artifact: Artifact, config: ServerConfig, metrics: ServerMetrics) -> Loaded:
    """Everything that takes time. Raises ArtifactError and ServerConfigError."""
    with verifying(artifact, config.verify) as confirm:
        return _load_model(artifact, config, metrics, confirm)


def _load_model(
    artifact: Artifact, config: ServerConfig, metrics: ServerMetrics, confirm: Callable[[], None]
) -> Loaded:
    tokenizer = Tokenizer.load(
        artifact.tokenizer, artifact.tokenizer_config, special_in_content=config.special_in_content
    )
    rows = artifact.vocab_size
    if rows is not None and tokenizer.vocab_size > rows:
        raise ArtifactError(
            f"{artifact.tokenizer}: has {tokenizer.vocab_size} tokens but the model only {rows};"
            " it belongs to another model"
        )
    try:
        check_num_beams(config.num_beams, artifact.config.top_k)
    except InvalidRequestError as error:
        raise ServerConfigError(f"--num-beams: {error}") from None
    generation = read_json_object(artifact.tokenizer.with_name("generation_config.json"))
    engine = load_engine(artifact, tokenizer, config, confirm)
    generator = TextGenerator(
        tokenizer,
        engine,
        max_seq_len=engine.max_request_tokens,
        max_requests=engine.max_requests,
        metrics=metrics,
        request_timeout_s=config.request_timeout,
    )
    model = ServedModel(
        generator=generator,
        native_defaults=_defaults({}, 0.0, config),  # upstream's server is always greedy
        openai_defaults=_defaults(generation, 1.0, config),
        exported_top_k=artifact.config.top_k,
        info=artifact.config.to_dict(),
        default_num_beams=config.num_beams,
    )
    return Loaded(model, engine)


def load_engine(
    artifact: Artifact, tokenizer: Tokenizer, config: ServerConfig, confirm: Callable[[], None]
) -> RunningEngine:
    """The engine over the artefact's VMFB on the configured device; `confirm` has the last word on it."""
    from shortfin_apps.llm.components import loading  # imports the device libraries

    stride = artifact.config.stride
    options = loading.EngineOptions(
        device=config.device,
        runtime=config.runtime,
        threads=config.threads,
        device_ids=config.device_ids,
        batch_mode=config.batch_mode,
        prefix_cache=config.prefix_cache,
        pages=config.pages,
        chunk_tokens=_in_tokens(config.chunk_tokens, config.chunk_block_size, stride),
        token_budget=_in_tokens(config.token_budget, config.max_pages_per_batch, stride),
        idle_budget=config.idle_budget,
        prefills_per_decode=config.prefills_per_decode,
        max_running=config.max_running,
        max_queue=config.max_queue,
        max_queue_tokens=config.max_queue_tokens,
        max_long_prefills=config.max_long_prefills,
        long_prefill_tokens=config.long_prefill_tokens,
        tenant_weights=config.weight_of_tenant,
        num_tokens=tokenizer.vocab_size,
        stall_timeout_s=config.stall_timeout,
    )
    return loading.load_engine(
        artifact.config, artifact.vmfb, artifact.parameters, tokenizer.eos_token_ids, options, confirm
    )


def _in_tokens(tokens: int | None, pages: int | None, stride: int) -> int | None:
    """What two settings for the same thing say, one in tokens and one in pages."""
    return pages * stride if tokens is None and pages is not None else tokens


def _defaults(generation: dict[str, object], otherwise: float, config: ServerConfig) -> SamplingDefaults:
    return SamplingDefaults.of_model(generation, otherwise=otherwise, override=config.default_temperature)


async def _in_daemon_thread(function: Callable[[], T]) -> T:
    """Unlike an executor's, such a thread does not keep a server from stopping."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # so that nobody cancels it under the thread's feet

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="model loader", daemon=True).start()
    return await asyncio.wrap_future(future)


def _exit_status(server: Server) -> int:
    if server.failure is None:
        return EXIT_FAILED if server.force_exit else EXIT_OK
    if isinstance(server.failure, LlmError):
        raise server.failure
    if _is_want_of_memory(server.failure):
        raise ServerConfigError(
            f"the model could not be loaded for want of memory or threads ({_first_line(server.failure)});"
            " free some, raise the limits (`ulimit -v`, `ulimit -u`), or give it fewer --pages or --threads"
        ) from server.failure
    logger.error("the model could not be loaded", exc_info=server.failure)
    return EXIT_FAILED


def _is_want_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in WANT_OF_MEMORY)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _abandon_thread(status: int) -> None:
    """Leaves without running destructors under a thread that is inside a device library."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _url(sockets: Sequence[socket.socket], is_tls: bool) -> str:
    host, port = sockets[0].getsockname()[:2]
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _banner(name: str, url: str, has_chat: bool) -> str:
    """Suggests a request that this model can answer: without a chat template, none for a chat."""
    route, body = "completions", '{"prompt": "The capital of France is", "temperature": 0}'
    if has_chat:
        question = '{"role": "user", "content": "What is the capital of France?"}'
        route, body = "chat/completions", '{"messages": [' + question + '], "temperature": 0}'
    return (
        f"Serving {name} at {url} (Ctrl-C stops it). Try:\n"
        f"  curl {url}/v1/{route} -H 'Content-Type: application/json' \\\n    -d '{body}'"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shortfin_apps.llm.server", description=__doc__)
    server_flags.add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except LlmError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:  # before there is a server that it could stop
        return EXIT_INTERRUPTED
