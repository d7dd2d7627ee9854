"""Check a model's description before its weights are fetched, read or hashed."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from shortfin_apps.llm.builder.sources.gguf_config import check_keys, gguf_family
from shortfin_apps.llm.builder.sources.gguf_file import GgufSource
from shortfin_apps.llm.builder.sources.gguf_header import metadata_at_start
from shortfin_apps.llm.builder.sources.gguf_kinds import check_kind
from shortfin_apps.llm.builder.sources.gguf_tokenizer import check_tokenizer
from shortfin_apps.llm.builder.sources.hf_config import hf_family
from shortfin_apps.llm.builder.sources.hf_files import read_json
from shortfin_apps.llm.builder.sources.hf_text_part import text_config
from shortfin_apps.llm.builder.sources.hf_tokenizer import check_has_tokenizer


def look_at_gguf(path: Path, accepted: Collection[str] = ()) -> None:
    """Raise BuildError unless the GGUF file's header is of a supported model.

    For a model in split files, `path` may be any of the files. `accepted`: unknown keys to ignore.
    """
    GgufSource(path, accepted=accepted)


def look_at_gguf_start(where: str, start: bytes) -> None:
    """Raise BuildError if `start`, the first bytes of a GGUF file, shows that the model is not supported.

    Unknown keys pass, as the user may have accepted them.
    """
    keys = metadata_at_start(where, start)
    check_kind(where, keys)
    if "general.architecture" in keys:
        check_keys(where, gguf_family(where, keys["general.architecture"]), keys, accepted=keys)
    if "tokenizer.ggml.pre" in keys:  # in files, comes after `tokenizer.ggml.model`
        check_tokenizer(where, str(keys.get("tokenizer.ggml.model", "")), keys["tokenizer.ggml.pre"])


def look_at_directory(directory: Path) -> None:
    """Raise BuildError unless the Hugging Face directory has a supported family and a tokenizer."""
    config = directory / "config.json"
    hf_family(str(config), text_config(str(config), read_json(config)))
    check_has_tokenizer(directory)
