"""Settings of a model without a server: the settings of `serve` that do not concern connections."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.serving.server.building import BuildFailed, built, fitted
from shortfin_apps.llm.serving.server.config import ServerConfig, ServerConfigError, Source
from shortfin_apps.llm.serving.server.config_sources import Note, load
from shortfin_apps.llm.serving.server.settings import HttpSettings
from shortfin_apps.llm.setting import settings_of

# Settings of connections and tenants, which have no effect without a server.
OF_SERVERS = (*(each.name for each in settings_of(HttpSettings)), "tenant_weights")
SETTINGS = tuple(name for name in ServerConfig.SETTINGS if name not in OF_SERVERS)
# Other defaults than the server's. The queue needs no limit, as this program is the only client.
DEFAULTS = {"max_queue_tokens": 1 << 40}


def local_config(
    model: str | os.PathLike[str] | None, settings: Mapping[str, Any], note: Note
) -> ServerConfig:
    """Merge `settings`, `SHORTFIN_LLM_*` variables and defaults, in this order of precedence.

    A setting of None counts as not given. `note` is called with a message for each setting without effect.
    Raises ServerConfigError.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    for name in given:
        if name in OF_SERVERS:
            raise ServerConfigError(
                f"`{name}` is a setting for `serve` alone: it has no effect without a server"
            )
    artifact = {} if model is None else {"artifact": Path(model)}
    return load({**artifact, **given}, Source(values=DEFAULTS), note)


def with_model(config: ServerConfig) -> ServerConfig:
    """Replace sources in the settings by model directories, which are built unless they are cached.

    Raises BuildError if a build fails (`built` raises BuildFailed, which is for commands).
    """
    try:
        return fitted(built(config))
    except BuildFailed as failure:
        raise BuildError(
            f"building {config.model.artifact} ended with status {failure.status}; its own message says why"
        ) from None
