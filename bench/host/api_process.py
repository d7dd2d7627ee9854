"""An API process of server.py's server; `shortfin_apps/llm/server/api_process.py` describes its start."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable

from bench.host.server import served, trained
from shortfin_apps.llm.api.service import Service
from shortfin_apps.llm.components.text.tokenizer import Tokenizer
from shortfin_apps.llm.server.api_process import run
from shortfin_apps.llm.server.config import ServerConfig
from shortfin_apps.llm.server.front_end import connected
from shortfin_apps.llm.server.model_loading import Loaded


def load(config: ServerConfig, service: Service, link: socket.socket, on_lost: Callable[[], None]) -> Loaded:
    tokenizer = Tokenizer(trained())
    engine = connected(service, link, on_lost)
    return Loaded(served(tokenizer, engine, service.metrics, f"{engine.number}-"), engine)


if __name__ == "__main__":
    sys.exit(run(load))
