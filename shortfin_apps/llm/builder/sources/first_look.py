"""Check a model's architecture and tokenizer before its weights are fetched, read or hashed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shortfin_apps.llm.builder.sources.gguf_config import gguf_family
from shortfin_apps.llm.builder.sources.gguf_header import metadata_at_start, parts_of, read_metadata
from shortfin_apps.llm.builder.sources.gguf_tokenizer import check_tokenizer
from shortfin_apps.llm.builder.sources.hf_config import hf_family
from shortfin_apps.llm.builder.sources.hf_files import read_json
from shortfin_apps.llm.contract.errors import BuildError


def look_at_gguf(path: Path) -> None:
    """Raise BuildError unless the architecture and the tokenizer of the GGUF file are supported.

    For a file in parts, `path` may be any part.
    """
    first = parts_of(path)[0]
    keys = read_metadata(first)
    gguf_family(str(first), keys.get("general.architecture"))
    if "tokenizer.ggml.model" not in keys:
        raise BuildError(f"{first}: has no tokenizer")
    _check_tokenizer(str(first), keys)


def look_at_gguf_start(where: str, start: bytes) -> None:
    """Raise BuildError if the first bytes of a GGUF file, `start`, show that it is not supported."""
    keys = metadata_at_start(where, start)
    if "general.architecture" in keys:
        gguf_family(where, keys["general.architecture"])
    if "tokenizer.ggml.pre" in keys:  # follows the model's keys
        _check_tokenizer(where, keys)


def _check_tokenizer(where: str, keys: Mapping[str, Any]) -> None:
    names = {"model": "", "pre": "default"}
    model, pre = (str(keys.get(f"tokenizer.ggml.{name}", other)) for name, other in names.items())
    check_tokenizer(where, model, pre)


def look_at_directory(directory: Path) -> None:
    """Raise BuildError unless the Hugging Face directory is of a supported family and has a tokenizer."""
    config = directory / "config.json"
    hf_family(str(config), read_json(config))
    if not (directory / "tokenizer.json").is_file():
        raise BuildError(
            f"{directory}/tokenizer.json: no such file; save the model with its fast tokenizer to have one"
        )
