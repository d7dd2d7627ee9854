"""Read the text files of a Hugging Face model directory: JSON, tokenizer settings, sampling defaults."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shortfin_apps.llm.builder.sources.base import templates
from shortfin_apps.llm.builder.sources.metadata_limits import (
    MAX_JSON_BYTES,
    MAX_TEMPLATE_CHARS,
    check_at_most,
    check_charsmap,
    check_vocabulary,
)
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.contract.tokenizer_config import NAMED_TOKENS

# Names and glob patterns.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
    "additional_chat_templates/*.jinja",
)
TOKENIZER = "tokenizer.json"
# Tokenizers of directories without a tokenizer.json, the preferred one first.
TEKKEN, SENTENCEPIECE = "tekken.json", "tokenizer.model"
OTHER_TOKENIZERS = (TEKKEN, SENTENCEPIECE, "added_tokens.json")
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
_TOKENIZER_KEYS = (*NAMED_TOKENS, "add_bos_token", "add_eos_token", "chat_template")
_NOT_KEPT = ("_from_model_config", "transformers_version", "eos_token_id")  # fields of generation_config.json


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """Return the JSON object in `path`; an empty one if the file is `optional` and missing.

    Raises BuildError.
    """
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise BuildError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise BuildError(f"{path}: must hold a JSON object")
    return value


def read_text(path: Path) -> str:
    """Return the text in `path`. Raises BuildError, also for a file above MAX_JSON_BYTES."""
    try:
        check_at_most(str(path), "has {} bytes", path.stat().st_size, MAX_JSON_BYTES)
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BuildError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BuildError(f"{path}: cannot be read ({error})") from error


def weight_files(directory: Path) -> list[str]:
    """List the names of the weight files: the ones in the index, or without an index `model.safetensors`.

    Other safetensors files, such as `consolidated.safetensors` and adapters, are ignored. Raises BuildError.
    """
    index = directory / WEIGHTS_INDEX
    if not index.exists():
        return [WEIGHTS]
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise BuildError(f"{index}: `weight_map` is missing")
    files = sorted({str(name) for name in names.values()})
    if outside := [name for name in files if Path(name).name != name]:
        raise BuildError(f"{index}: `{outside[0]}` is not the name of a file in its folder")
    return files


def tokenizer_files(directory: Path) -> list[Path]:
    """List the existing files that TOKENIZER_FILES names, without a tokenizer.json also OTHER_TOKENIZERS."""
    others = () if (directory / TOKENIZER).exists() else OTHER_TOKENIZERS
    return [file for name in (*TOKENIZER_FILES, *others) for file in sorted(directory.glob(name))]


def tokenizer_text(directory: Path) -> str:
    """Return the content of `tokenizer.json`. Raises BuildError, also if a vocabulary limit is exceeded."""
    path = directory / TOKENIZER
    text = read_text(path)
    tokenizer = read_json(path)
    check_vocabulary(str(path), list(_tokens(tokenizer)))
    for charsmap in _charsmaps(tokenizer.get("normalizer")):
        check_charsmap(str(path), charsmap)
    return text


def _charsmaps(normalizer: object) -> Iterator[bytes]:
    """Yield the character maps (`precompiled_charsmap`) of a normalizer and of the normalizers in it."""
    if not isinstance(normalizer, dict):
        return
    if isinstance(text := normalizer.get("precompiled_charsmap"), str):
        with suppress(ValueError):  # the `tokenizers` library reports invalid base64
            yield base64.b64decode(text)
    parts = normalizer.get("normalizers")
    for part in parts if isinstance(parts, list) else ():
        yield from _charsmaps(part)


def _tokens(tokenizer: Mapping[str, Any]) -> Iterator[str]:
    """Yield the token strings in a `tokenizer.json`.

    Malformed content is skipped: the `tokenizers` library reports it.
    """
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    names = (
        [each.get("content") for each in added if isinstance(each, dict)] if isinstance(added, list) else []
    )
    if isinstance(vocab, dict):
        names += vocab
    if isinstance(vocab, list):  # of pairs of token and score
        names += [each[0] for each in vocab if isinstance(each, list) and each]
    yield from (name for name in names if isinstance(name, str))


def tokenizer_config(directory: Path) -> dict[str, Any]:
    """Return the used fields of `tokenizer_config.json`. Raises BuildError.

    Includes chat templates from separate files, and special tokens that only `special_tokens_map.json` has.
    """
    raw = read_json(directory / "tokenizer_config.json", optional=True)
    raw = read_json(directory / "special_tokens_map.json", optional=True) | _given(raw)
    config = {key: raw[key] for key in _TOKENIZER_KEYS if raw.get(key) is not None}
    if of_processor := read_json(directory / "chat_template.json", optional=True).get("chat_template"):
        config.setdefault("chat_template", of_processor)
    template = directory / "chat_template.jinja"
    if template.exists():
        config["chat_template"] = read_text(template)
    more = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    if named := {file.stem: read_text(file) for file in more}:
        config["chat_template"] = templates(config.get("chat_template"), named)
    _check_template(str(directory), config.get("chat_template"))
    return config


def generation_config(directory: Path, model_eos: int | list[int] | None) -> dict[str, Any]:
    """Return the fields of `generation_config.json`, with `eos_token_id` as a list. Raises BuildError.

    `model_eos`: the `eos_token_id` of `config.json`, used if `generation_config.json` has none.
    """
    raw = read_json(directory / "generation_config.json", optional=True)
    eos = _given(raw).get("eos_token_id", model_eos)
    ids = eos if isinstance(eos, list) else [eos]
    config: dict[str, Any] = {"eos_token_id": [i for i in ids if isinstance(i, int)]}
    return config | {key: value for key, value in _given(raw).items() if key not in _NOT_KEPT}


def _given(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `raw` that are not null."""
    return {key: value for key, value in raw.items() if value is not None}


def _check_template(where: str, template: object) -> None:
    """Raise BuildError if a template is too long; `template`: a string, or a list of named templates."""
    named = template if isinstance(template, list) else [{"template": template}]
    for text in (each.get("template") for each in named if isinstance(each, dict)):
        if isinstance(text, str):
            check_at_most(where, "a chat template has {} characters", len(text), MAX_TEMPLATE_CHARS)
