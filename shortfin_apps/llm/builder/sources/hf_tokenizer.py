"""The tokenizer's settings and the sampling defaults in a Hugging Face model directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shortfin_apps.llm.builder.sources.json_file import read_json, read_text
from shortfin_apps.llm.builder.sources.metadata_limits import MAX_TEMPLATE_CHARS, check_at_most

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
)
_TOKENIZER_KEYS = (
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
    "add_bos_token",
    "add_eos_token",
    "chat_template",
)
_NOT_KEPT = ("_from_model_config", "transformers_version", "eos_token_id")  # of generation_config.json


def tokenizer_config(directory: Path) -> dict[str, Any]:
    """The fields of `tokenizer_config.json` that are used. Raises BuildError."""
    raw = read_json(directory / "tokenizer_config.json", optional=True)
    config = {key: raw[key] for key in _TOKENIZER_KEYS if raw.get(key) is not None}
    template = directory / "chat_template.jinja"
    if template.exists():
        config["chat_template"] = read_text(template)
    _check_template(str(directory), config.get("chat_template"))
    return config


def generation_config(directory: Path, model_eos: int | list[int] | None) -> dict[str, Any]:
    """`generation_config.json`, whose sampling fields are the publisher's defaults. Raises BuildError.

    `model_eos` is the `eos_token_id` of `config.json`, which counts where this file has none.
    """
    raw = read_json(directory / "generation_config.json", optional=True)
    eos = raw.get("eos_token_id", model_eos)
    ids = eos if isinstance(eos, list) else [eos]
    config: dict[str, Any] = {"eos_token_id": [i for i in ids if isinstance(i, int)]}
    return config | {key: raw[key] for key in raw if raw[key] is not None and key not in _NOT_KEPT}


def _check_template(where: str, template: object) -> None:
    """`chat_template` is one text, or a list of named ones."""
    named = template if isinstance(template, list) else [{"template": template}]
    for text in (each.get("template") for each in named if isinstance(each, dict)):
        if isinstance(text, str):
            check_at_most(where, "a chat template has {} characters", len(text), MAX_TEMPLATE_CHARS)
