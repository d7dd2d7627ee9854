"""An API process: one of several that answer HTTP and share the engine of their parent process.

    python -m shortfin_apps.llm.serving.server.api_process LISTENER LINK < OPTIONS

LISTENER and LINK are file descriptors: the port's socket, shared by all API processes, and the connection to
the engine. OPTIONS are JSON; they contain keys, which must not appear in a list of processes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from shortfin_apps.llm.components.grammar.compiler import GrammarCompiler
from shortfin_apps.llm.contract.errors import LlmError
from shortfin_apps.llm.serving.api.service import Service, carry_out
from shortfin_apps.llm.serving.engine_link.remote_engine import RemoteEngine, wait_for_engine
from shortfin_apps.llm.serving.frontend.metrics import ServerMetrics
from shortfin_apps.llm.serving.server import logs
from shortfin_apps.llm.serving.server.config import ServerConfig, plain
from shortfin_apps.llm.serving.server.http_server import Server
from shortfin_apps.llm.serving.server.model_loading import Loaded, load_tokenizer, open_artifact, served_model
from shortfin_apps.llm.serving.server.service import make_service
from shortfin_apps.llm.serving.server.start_up import exit_status_of, exit_with_thread, settled

logger = logging.getLogger("shortfin_apps.llm.serving.server.api_process")  # this module runs as `__main__`

LAST_ANSWERS_S = 0.5  # to send the answers of requests that were lost with the engine

LoadFrontEnd = Callable[[ServerConfig, Service, socket.socket, Callable[[], None]], Loaded]
"""Loads the model, given the socket to the engine's process and a callback for the end of that process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiProcessOptions:
    """Options that the engine's process passes to an API process.

    `name`: the model's name. `replaces`: this process replaces one that has ended, and listens only once it
    can serve.
    """

    config: ServerConfig
    name: str
    engine_pid: int
    replaces: bool = False

    def to_json(self) -> bytes:
        """Serialise the options, including secrets."""
        return json.dumps(
            [self.config.given, self.config.source, self.name, self.engine_pid, self.replaces], default=plain
        ).encode()

    @classmethod
    def from_json(cls, text: bytes) -> ApiProcessOptions:
        settings, source, name, engine_pid, replaces = json.loads(text)
        config = replace(ServerConfig.of(settings), source=source)
        return cls(config=config, name=name, engine_pid=engine_pid, replaces=replaces)


def run(load: LoadFrontEnd) -> int:
    """Answer requests until a signal or the end of the engine's process; return the exit status."""
    listener, link = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    for inherited in (listener, link):
        inherited.set_inheritable(False)  # our own child processes must not inherit them
    options = ApiProcessOptions.from_json(sys.stdin.buffer.read())
    config = options.config
    logs.set_up(config.http.log_level, config.http.log_format)
    logs.quieten_uvicorn(config.http.log_level)
    metrics = ServerMetrics(
        options.name, engine_pid=options.engine_pid, tenants=tuple(config.engine.batching.tenant_weights)
    )
    service = make_service(config, options.name, metrics)
    server = Server(
        config,
        service,
        lambda: settled(load(config, service, link, lambda: _end_soon(server))),
        announces=False,
        loads_first=options.replaces,
    )
    server.run(sockets=[listener])
    if not server.force_exit:
        service.close()
    status = exit_status_of(server.failure, was_forced=server.force_exit)
    if server.leaves_thread:
        exit_with_thread(status)
    return status


def load_front_end(
    config: ServerConfig, service: Service, link: socket.socket, on_lost: Callable[[], None]
) -> Loaded:
    """Load what an API process needs, and wait for the engine at the other end of `link`.

    Raises ArtifactError and UnavailableError.
    """
    artifact = open_artifact(config)
    tokenizer = load_tokenizer(artifact, config)
    grammars = GrammarCompiler(tokenizer.to_json, tokenizer.eos_token_ids)
    with grammars.preparing():
        engine = connected(service, link, on_lost)
    model = served_model(
        artifact,
        config,
        tokenizer,
        engine,
        grammars,
        service.metrics,
        id_prefix=f"{engine.number}-",
        everywhere=engine.ask,
    )
    return Loaded(model, engine)


def connected(service: Service, link: socket.socket, on_lost: Callable[[], None]) -> RemoteEngine:
    """Wait until the engine is loaded, and return it. Raises UnavailableError."""
    welcome = wait_for_engine(link)
    return RemoteEngine(link, welcome, execute=partial(carry_out, service=service), on_lost=on_lost)


def _end_soon(server: Server) -> None:
    """End this process after the engine's process has ended; wait at most LAST_ANSWERS_S for clients."""
    logger.error("the process of the engine has ended, so this API process ends, too")
    server.should_exit = True
    asyncio.get_running_loop().call_later(LAST_ANSWERS_S, server.handle_exit, signal.SIGTERM, None)


def main() -> int:
    try:
        return run(load_front_end)
    except LlmError as error:
        logger.error("%s", error)
        return 2
    finally:
        logs.flush()


if __name__ == "__main__":
    sys.exit(main())
