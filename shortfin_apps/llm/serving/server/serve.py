"""Serves one model: opens the port, loads, serves, and drains.

The port opens at once, and `/ready` answers 503 while the model loads in its own thread. Ctrl-C or SIGTERM
refuses new requests, lets running ones finish, then closes the port; a second signal stops at once.
"""

from __future__ import annotations

import logging
import socket
from functools import partial

from shortfin_apps.llm.serving.frontend.metrics import ServerMetrics
from shortfin_apps.llm.serving.server import logs
from shortfin_apps.llm.serving.server.config import ServerConfig
from shortfin_apps.llm.serving.server.engine_process import EngineProcess
from shortfin_apps.llm.serving.server.http_server import (
    BACKLOG,
    MAX_CONNECTIONS,
    Server,
    bind,
    http_config,
    url_of,
    warn_if_open,
)
from shortfin_apps.llm.serving.server.life_signs import LifeSigns
from shortfin_apps.llm.serving.server.model_loading import (
    check_address_space,
    load_engine,
    load_model,
    open_artifact,
    open_draft,
)
from shortfin_apps.llm.serving.server.service import make_service
from shortfin_apps.llm.serving.server.start_up import (
    EXIT_DEVICE_LOST,
    allow_open_files,
    exit_status_of,
    exit_with_thread,
    settled,
)

logger = logging.getLogger(__name__)


def serve(config: ServerConfig, listener: socket.socket | None = None, signs: LifeSigns | None = None) -> int:
    """Serve until a signal; return the exit status. Raises LlmError if the server cannot start.

    `listener` is a bound socket to use instead of the settings' address; `signs` reports to a supervisor.
    """
    logs.quieten_uvicorn(config.http.log_level)
    artifact, draft = open_artifact(config), open_draft(config)
    check_address_space([artifact, *([draft] if draft else ())], config)
    allow_open_files(MAX_CONNECTIONS)
    name = config.model.served_model_name or artifact.name
    service = make_service(
        config, name, ServerMetrics(name, tenants=tuple(config.engine.batching.tenant_weights))
    )
    server: Server | EngineProcess
    if config.api_processes:
        http_config(config, service)  # reports problems with keys and certificates once
        server = EngineProcess(config, name, lambda: settled(load_engine(artifact, config, draft)))
    else:
        load = partial(load_model, artifact, config, service.metrics, draft)
        server = Server(config, service, lambda: settled(load()))
    warn_if_open(config)
    sock = listener or bind(config.http.host, config.http.port)
    sock.listen(BACKLOG)
    logger.info("listening on %s, loading %s", url_of([sock], config.http.ssl_certfile is not None), name)
    if signs is not None:
        signs.start(lambda: server.serves)
    server.run(sockets=[sock])
    if not (server.force_exit or server.is_lost):
        service.close()
    status = exit_status_of(server.failure, was_forced=server.force_exit, is_lost=server.is_lost)
    if signs is not None and status == EXIT_DEVICE_LOST:
        signs.tell_loss()
    if server.leaves_thread or status == EXIT_DEVICE_LOST:
        exit_with_thread(status)
    return status
