"""The server's flight recorder: the metadata of its dumps, and the signal that requests a dump."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable

from shortfin_apps.llm import __version__
from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.recorder.records import Header
from shortfin_apps.llm.contract.errors import LlmError
from shortfin_apps.llm.contract.iree_release import installed_version
from shortfin_apps.llm.serving.frontend.engine_client import EngineClient
from shortfin_apps.llm.serving.server.config import ServerConfig

logger = logging.getLogger(__name__)

_LIBRARIES = ("iree-base-runtime", "shortfin", "numpy")
# Settings that determine the invocations; none are secret.
_SETTINGS = (
    *("device", "runtime", "threads", "batch_mode", "chunk_tokens", "token_budget", "max_running"),
    *("prefix_cache", "pipeline_depth", "static_threshold", "speculative", "speculative_tokens"),
)

_tasks: set[asyncio.Task[None]] = set()  # the event loop keeps only weak references


def dump_header(artifact: Artifact, config: ServerConfig) -> Header:
    """Return the header of the server's dumps: model, files, versions and settings."""
    files = {}
    if (manifest := artifact.manifest) is not None:
        paths = (artifact.vmfb, *artifact.parameters)
        files = {p.name: manifest.files[p.name].sha256 for p in paths if p.name in manifest.files}
    installed = {name: installed_version(name) for name in _LIBRARIES}
    versions = {name: known for name, known in installed.items() if known is not None}
    return Header(
        model=config.model.served_model_name or artifact.name,
        files=files,
        versions={"shortfin-llm": __version__, **versions},
        settings={name: value for name, value in config.to_json().items() if name in _SETTINGS},
    )


def dump_at_signal(engine: Callable[[], EngineClient | None]) -> None:
    """Let SIGUSR1 write a dump of `engine()`, which is None while the model loads.

    Callers must run in the event loop.
    """

    def on_signal() -> None:
        task = asyncio.ensure_future(_dump(engine()))
        _tasks.add(task)
        task.add_done_callback(_tasks.discard)

    # Outside of the main thread, a loop cannot handle signals.
    with contextlib.suppress(ValueError, RuntimeError):
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, on_signal)


async def _dump(engine: EngineClient | None) -> None:
    if engine is None:
        logger.warning("SIGUSR1: the model is still loading, so there is nothing to dump")
        return
    try:
        await engine.dump("SIGUSR1")
    except Exception as error:  # nothing awaits this task
        logger.error("SIGUSR1: %s", error, exc_info=not isinstance(error, LlmError))
