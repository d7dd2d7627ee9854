"""The state of a server's routes, from its settings."""

from __future__ import annotations

from shortfin_apps.llm.api.service import Service
from shortfin_apps.llm.components.frontend.metrics import ServerMetrics
from shortfin_apps.llm.server.config import ServerConfig
from shortfin_apps.llm.server.http_server import limits_of


def make_service(config: ServerConfig, name: str, metrics: ServerMetrics) -> Service:
    """For a model of this name, which is still to be loaded."""
    return Service(
        name=name,
        metrics=metrics,
        config=config.model_dump(mode="json"),  # secrets as stars
        limits=limits_of(config),
        strict_fields=config.strict_fields,
        stream_keep_alive_s=config.stream_keep_alive or None,
    )
