"""Looks at a model's architecture and tokenizer before its weights are fetched, read or hashed."""

from __future__ import annotations

from pathlib import Path

from shortfin_apps.llm.builder.model.family import FAMILIES
from shortfin_apps.llm.builder.sources.base import unsupported
from shortfin_apps.llm.builder.sources.gguf_header import read_scalars
from shortfin_apps.llm.builder.sources.gguf_tokenizer import check_tokenizer
from shortfin_apps.llm.builder.sources.json_file import read_json
from shortfin_apps.llm.errors import BuildError


def look_at_gguf(path: Path) -> None:
    """Raises BuildError unless the architecture and the tokenizer of the GGUF file are supported."""
    keys = read_scalars(path)
    _check_architecture(str(path), keys.get("general.architecture"))
    model, pre = (keys.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if model is None:
        raise BuildError(f"{path}: has no tokenizer")
    check_tokenizer(str(path), str(model), "default" if pre is None else str(pre))


def look_at_directory(directory: Path) -> None:
    """Raises BuildError unless the Hugging Face directory is of a supported family and has a tokenizer."""
    config = directory / "config.json"
    found = read_json(config)
    _check_architecture(str(config), found.get("model_type"))
    if not (directory / "tokenizer.json").is_file():
        raise BuildError(
            f"{directory}/tokenizer.json: no such file; save the model with its fast tokenizer to have one"
        )


def _check_architecture(where: str, name: object) -> None:
    if not isinstance(name, str) or name not in FAMILIES:
        raise unsupported(where, f"architecture `{name}`")
