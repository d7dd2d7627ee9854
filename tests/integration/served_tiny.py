"""`random:tiny` behind the routes, in this process."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.serving.api.app import create_app
from shortfin_apps.llm.serving.api.responses.store import ResponseStore
from shortfin_apps.llm.serving.api.service import Service
from shortfin_apps.llm.serving.frontend.metrics import ServerMetrics
from shortfin_apps.llm.serving.server import config_sources
from shortfin_apps.llm.serving.server.model_loading import load_model
from shortfin_apps.llm.serving.server.service import receipt_settings

MODEL = "m"


@asynccontextmanager
async def serving(artifact: Artifact, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Service]]:
    """A client of a server with these settings; asserts that every page is given back."""
    config = config_sources.load({"artifact": artifact.vmfb.parent, **settings})
    metrics = ServerMetrics(MODEL)
    loaded = load_model(artifact, config, metrics)
    loaded.engine.start()
    service = Service(
        name=MODEL,
        metrics=metrics,
        config={},
        receipts=receipt_settings(config),
        responses=ResponseStore(100, 600.0, time.monotonic),
    )
    service.serve(loaded.model)
    transport = httpx.ASGITransport(app=create_app(service, root_path=""))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            yield client, service
        await loaded.engine.drain(60.0)
    finally:
        await loaded.engine.close()
    assert loaded.engine.stats().pages.leased == 0
