"""Check a model's architecture and tokenizer before its weights are fetched, read or hashed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shortfin_apps.llm.builder.sources.gguf_config import gguf_family
from shortfin_apps.llm.builder.sources.gguf_header import metadata_at_start, parts_of, read_gguf
from shortfin_apps.llm.builder.sources.gguf_tokenizer import check_tokenizer
from shortfin_apps.llm.builder.sources.hf_config import hf_family
from shortfin_apps.llm.builder.sources.hf_files import read_json
from shortfin_apps.llm.builder.sources.hf_text_part import text_config
from shortfin_apps.llm.builder.sources.hf_tokenizer import check_has_tokenizer
from shortfin_apps.llm.contract.errors import BuildError


def look_at_gguf(path: Path) -> None:
    """Raise BuildError unless the architecture and the tokenizer of the GGUF file are supported.

    For a model in split files, `path` may be any of the files.
    """
    first = parts_of(path)[0]
    keys = read_gguf(first).metadata
    if "tokenizer.ggml.model" not in keys:
        gguf_family(str(first), keys.get("general.architecture"))
        raise BuildError(f"{first}: has no tokenizer")
    _check(str(first), {"general.architecture": None, "tokenizer.ggml.pre": "default", **keys})


def look_at_gguf_start(where: str, start: bytes) -> None:
    """Raise BuildError if `start`, the first bytes of a GGUF file, shows that the model is not supported."""
    _check(where, metadata_at_start(where, start))


def _check(where: str, keys: Mapping[str, Any]) -> None:
    """Check the architecture and the tokenizer, each only if `keys` has the key for it."""
    if "general.architecture" in keys:
        gguf_family(where, keys["general.architecture"])
    if "tokenizer.ggml.pre" in keys:  # in files, comes after `tokenizer.ggml.model`
        model, pre = keys.get("tokenizer.ggml.model", ""), keys["tokenizer.ggml.pre"]
        check_tokenizer(where, str(model), str(pre))


def look_at_directory(directory: Path) -> None:
    """Raise BuildError unless the Hugging Face directory has a supported family and a tokenizer."""
    config = directory / "config.json"
    hf_family(str(config), text_config(str(config), read_json(config)))
    check_has_tokenizer(directory)
