"""Checks an edited `config.json` against the values that the program was compiled for.

A program cannot detect most wrong values: beyond the compiled context, rotary embeddings repeat, and with too
narrow a window, pages are freed while the program still reads these pages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from shortfin_apps.llm.artifact.file_record import FileRecord
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.contract.errors import ArtifactError, BuildError
from shortfin_apps.llm.model.config import model_config
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec

CONTEXT = "max_seq_len"  # may be lowered at deployment
BATCH_SIZES = ("prefill_batch_sizes", "decode_batch_sizes")  # some may be removed at deployment
CACHE = "paged_kv_cache"
PAGE_COUNT = f"{CACHE}.device_block_count"  # chosen at deployment


def load_compiled_config(
    path: Path, built: FileRecord | None, spec: ModelSpec, options: BuildOptions
) -> ModelConfig:
    """Read a `config.json`; `built` is the manifest's record of the file that the build wrote.

    Raises ArtifactError, naming the field, if a field was edited to a value that the program does not
    support.
    """
    config = ModelConfig.load(path)
    if built is None or hashlib.sha256(path.read_bytes()).hexdigest() != built.sha256:
        _check(path, config, spec, options)
    return config


def _check(path: Path, config: ModelConfig, spec: ModelSpec, options: BuildOptions) -> None:
    try:
        compiled = model_config(spec, options)
    except (BuildError, ArithmeticError, LookupError, TypeError, ValueError) as error:  # a damaged manifest
        raise ArtifactError(f"{path}: the manifest's options are not valid for a build ({error})") from error
    for name, value, right in _changed(config, compiled):
        raise ArtifactError(
            f"{path}: `{name}` is {value}, but the program was compiled for {right}; restore that field, or "
            "rebuild with `shortfin-llm build`"
        )


def _changed(config: ModelConfig, compiled: ModelConfig) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and compiled value of each field with a value that the program does not support."""
    right = _values(compiled)
    for name, value in _values(config).items():
        if not _is_allowed(name, value, right[name]):
            yield name, _shown(value), _shown(right[name])


def _is_allowed(name: str, value: Any, right: Any) -> bool:
    if name == PAGE_COUNT:
        return True
    if name == CONTEXT:
        return bool(value <= right)
    if name in BATCH_SIZES:
        return set(value) <= set(right)
    return bool(value == right)


def _values(config: ModelConfig) -> dict[str, Any]:
    """Return all fields by name, including a page's elements per slab, which a config.json may omit."""
    cache = replace(config.paged_kv_cache, paged_kv_block_size_elements_per_device=config.page_elements)
    own = {field.name: getattr(config, field.name) for field in fields(config) if field.name != CACHE}
    return own | {f"{CACHE}.{field.name}": getattr(cache, field.name) for field in fields(cache)}


def _shown(value: object) -> str:
    return ", ".join(map(repr, value)) if isinstance(value, tuple) else repr(value)
