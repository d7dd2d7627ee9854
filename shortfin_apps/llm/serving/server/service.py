"""Creates the state of a server's routes from its settings."""

from __future__ import annotations

import time

from shortfin_apps.llm.serving.api.limits import Limits
from shortfin_apps.llm.serving.api.responses.store import ResponseStore
from shortfin_apps.llm.serving.api.service import ReceiptSettings, Service
from shortfin_apps.llm.serving.frontend.metrics import ServerMetrics
from shortfin_apps.llm.serving.server.config import ServerConfig
from shortfin_apps.llm.serving.server.tracing import trace_provider

# Seconds without output after which a stream sends a comment, so that no proxy closes it as idle: the HTML
# standard's advice for event streams, and half the shortest common timeout (30 s).
STREAM_KEEP_ALIVE_S = 15.0
RESPONSE_TTL_S = 3600.0  # a response is stored this long, unless the store's memory limit drops it earlier


def make_service(
    config: ServerConfig,
    name: str,
    metrics: ServerMetrics,
    *,
    stream_keep_alive_s: float | None = STREAM_KEEP_ALIVE_S,
) -> Service:
    """Create the state for a model that is not loaded yet. Raises ReceiptError and ServerConfigError."""
    return Service(
        name=name,
        source=config.source,
        metrics=metrics,
        config=config.to_json(),  # secrets become asterisks
        limits=Limits(body_bytes=config.requests.max_body_bytes),
        strict_fields=config.requests.strict_fields,
        receipts=receipt_settings(config),
        stream_keep_alive_s=stream_keep_alive_s,
        responses=_responses(config),
        traces=trace_provider(config),
    )


def receipt_settings(config: ServerConfig) -> ReceiptSettings:
    """Return the settings of receipts. Raises ReceiptError for an unusable key."""
    requests = config.requests
    if requests.receipt_key is None:
        return ReceiptSettings(are_default=requests.receipts)
    from shortfin_apps.llm.serving.receipts.signature import Signer

    return ReceiptSettings(are_default=requests.receipts, signer=Signer.load(requests.receipt_key))


def _responses(config: ServerConfig) -> ResponseStore:
    """Create the store of responses, which stores none with several API processes.

    API processes share no memory, and a client's next request may reach another process.
    """
    max_responses = config.requests.stored_responses if config.api_processes <= 1 else 0
    return ResponseStore(max_responses, RESPONSE_TTL_S, time.monotonic)
