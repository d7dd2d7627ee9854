"""An API process of the server in server.py, started as `serving/server/api_process.py` says."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable

from bench.host.server import served, trained
from shortfin_apps.llm.serving.api.service import Service
from shortfin_apps.llm.serving.server.api_process import connected, run
from shortfin_apps.llm.serving.server.config import ServerConfig
from shortfin_apps.llm.serving.server.model_loading import Loaded
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer


def load(config: ServerConfig, service: Service, link: socket.socket, on_lost: Callable[[], None]) -> Loaded:
    tokenizer = Tokenizer(trained())
    engine = connected(service, link, on_lost)
    return Loaded(served(tokenizer, engine, service.metrics, f"{engine.number}-"), engine)


if __name__ == "__main__":
    sys.exit(run(load))
