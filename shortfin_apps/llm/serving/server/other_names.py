"""Upstream shortfin's names of settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from shortfin_apps.llm.serving.server.config import ServerConfig

# Upstream's names and ours. Read as flags and in files.
UPSTREAM_NAMES = {
    "model_config": "model_config_json",  # pydantic reserves `model_config`
    "prefix_sharing_algorithm": "prefix_cache",
    "server_config": "config",
}
# Upstream's settings without an equivalent here, and whether the flag takes a value.
UPSTREAM_IGNORED: dict[str, Literal["flag", "value"]] = {
    "program_isolation": "value",
    "chunk_block_size": "value",
    "num_beams": "value",
    "use_native_impls": "flag",
    "amdgpu_async_allocations": "flag",
    "amdgpu_async_caching": "flag",
    "amdgpu_allow_device_reuse": "flag",
    "amdgpu_allocators": "value",
    "decode_config": "value",
}

Note = Callable[[str], None]  # receives one sentence about a setting that has no effect


def note_ignored(name: str, value: object, note: Note) -> None:
    """Note that an upstream setting is ignored; for `decode_config`, note each setting in it."""
    inner = [f"{name}.{key}" for key in value] if isinstance(value, Mapping) else [name]
    for each in inner:
        own = each.rpartition(".")[2]
        instead = f"; set `{own}` at the top level instead" if own in ServerConfig.model_fields else ""
        note(f"upstream's setting `{each}` has no effect here{instead}")
