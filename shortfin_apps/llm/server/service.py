"""The state of a server's routes, from its settings."""

from __future__ import annotations

import time

from shortfin_apps.llm.api.responses.store import ResponseStore
from shortfin_apps.llm.api.service import ReceiptSettings, Service
from shortfin_apps.llm.components.frontend.metrics import ServerMetrics
from shortfin_apps.llm.receipts.key_files import load_signer
from shortfin_apps.llm.server.config import ServerConfig
from shortfin_apps.llm.server.http_server import limits_of
from shortfin_apps.llm.server.tracing import trace_provider


def make_service(config: ServerConfig, name: str, metrics: ServerMetrics) -> Service:
    """For a model of this name, which is still to be loaded. Raises ReceiptError and ServerConfigError."""
    return Service(
        name=name,
        metrics=metrics,
        config=config.model_dump(mode="json"),  # secrets as stars
        limits=limits_of(config),
        strict_fields=config.strict_fields,
        receipts=receipt_settings(config),
        stream_keep_alive_s=config.stream_keep_alive or None,
        responses=_responses(config),
        traces=trace_provider(config),
    )


def receipt_settings(config: ServerConfig) -> ReceiptSettings:
    """Raises ReceiptError for a key that cannot be used."""
    signer = None if config.receipt_key is None else load_signer(config.receipt_key)
    return ReceiptSettings(are_default=config.receipts, signer=signer)


def _responses(config: ServerConfig) -> ResponseStore:
    """API processes share no memory, and the next request may reach another one: they store none."""
    max_responses = config.stored_responses if config.api_processes == 1 else 0
    return ResponseStore(max_responses, config.stored_responses_ttl, time.monotonic)
