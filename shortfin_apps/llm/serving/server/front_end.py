"""Loads the parts of an API process other than the engine, which another process runs."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial

from shortfin_apps.llm.components.grammar.compiler import GrammarCompiler
from shortfin_apps.llm.serving.api.service import Service, carry_out
from shortfin_apps.llm.serving.engine_link.remote_engine import RemoteEngine, wait_for_engine
from shortfin_apps.llm.serving.server.config import ServerConfig
from shortfin_apps.llm.serving.server.model_loading import Loaded, load_tokenizer, open_artifact, served_model


def load_front_end(
    config: ServerConfig, service: Service, link: socket.socket, on_lost: Callable[[], None]
) -> Loaded:
    """Wait for the engine at the other end of `link`. Raises ArtifactError and UnavailableError."""
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
    """Return the engine once it is loaded. Raises UnavailableError."""
    welcome = wait_for_engine(link)
    return RemoteEngine(link, welcome, execute=partial(carry_out, service=service), on_lost=on_lost)
