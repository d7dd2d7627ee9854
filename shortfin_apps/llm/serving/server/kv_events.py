"""Options of KV events from the settings."""

from __future__ import annotations

import logging
import os

from shortfin_apps.llm.components.kv_events.options import KVEventOptions
from shortfin_apps.llm.serving.server.config import ServerConfig

logger = logging.getLogger(__name__)


def kv_event_options(config: ServerConfig, model_name: str) -> KVEventOptions | None:
    """Return where to publish events of `model_name`, or None; warn if others can read them."""
    if config.kv_events_endpoint is None:
        return None
    options = KVEventOptions(
        endpoint=config.kv_events_endpoint,
        replay_endpoint=config.kv_events_replay_endpoint,
        topic=config.kv_events_topic or f"kv@{config.host}:{config.port}@{model_name}",
        hash_seed=os.environ.get("PYTHONHASHSEED"),
    )
    if not options.is_local:
        logger.warning("anyone who can reach %s can read the token ids of prompts", options.endpoint)
    return options
