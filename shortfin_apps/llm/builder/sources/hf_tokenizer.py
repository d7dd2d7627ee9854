"""Read the tokenizer of a Hugging Face directory: a `tokenizer.json`, or a file that replaces it.

Directories without one may have Mistral's `tekken.json` or SentencePiece's `tokenizer.model`, which are
converted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shortfin_apps.llm.builder.sources.base import TokenizerFiles
from shortfin_apps.llm.builder.sources.gguf_tokenizer import GgufVocabulary, rebuild_tokenizer
from shortfin_apps.llm.builder.sources.hf_files import (
    SENTENCEPIECE,
    TEKKEN,
    TOKENIZER,
    generation_config,
    read_json,
    tokenizer_config,
    tokenizer_text,
)
from shortfin_apps.llm.builder.sources.sentencepiece_file import sentencepiece_vocabulary
from shortfin_apps.llm.builder.sources.tekken_file import tekken_vocabulary
from shortfin_apps.llm.contract.errors import BuildError


def check_has_tokenizer(directory: Path) -> None:
    """Raise BuildError if the directory has no tokenizer."""
    if not any((directory / name).is_file() for name in (TOKENIZER, TEKKEN, SENTENCEPIECE)):
        raise BuildError(
            f"{directory}: has no {TOKENIZER}, {TEKKEN} or {SENTENCEPIECE}; copy the tokenizer's files there"
        )


def read_tokenizer(directory: Path, model_eos: int | list[int] | None) -> TokenizerFiles:
    """Return the tokenizer's files. Raises BuildError.

    `model_eos`: the `eos_token_id` of `config.json`, used if `generation_config.json` has none.
    """
    check_has_tokenizer(directory)
    config, generation = tokenizer_config(directory), generation_config(directory, model_eos)
    if (directory / TOKENIZER).exists():
        return TokenizerFiles(tokenizer=tokenizer_text(directory), config=config, generation=generation)
    vocabulary, path = _vocabulary(directory)
    vocabulary.add_bos_token = config.get("add_bos_token", vocabulary.add_bos_token)
    vocabulary.add_eos_token = config.get("add_eos_token", vocabulary.add_eos_token)
    rebuilt = rebuild_tokenizer(str(path), vocabulary)
    if not generation["eos_token_id"]:
        generation["eos_token_id"] = rebuilt.generation["eos_token_id"]
    return TokenizerFiles(
        tokenizer=rebuilt.tokenizer, config={**rebuilt.config, **config}, generation=generation
    )


def _vocabulary(directory: Path) -> tuple[GgufVocabulary, Path]:
    if (path := directory / TEKKEN).is_file():
        return tekken_vocabulary(path), path
    path = directory / SENTENCEPIECE
    return sentencepiece_vocabulary(path, _added_tokens(directory)), path


def _added_tokens(directory: Path) -> dict[int, tuple[str, bool]]:
    """Return the tokens that transformers adds to a `tokenizer.model`: id -> token, whether it is control."""
    listed = read_json(directory / "added_tokens.json", optional=True)
    added = {i: (token, True) for token, i in listed.items() if isinstance(i, int)}
    decoder = read_json(directory / "tokenizer_config.json", optional=True).get("added_tokens_decoder")
    for number, token in (decoder if isinstance(decoder, Mapping) else {}).items():
        if number.isdecimal() and isinstance(text := _field(token, "content"), str):
            added[int(number)] = text, _field(token, "special") is not False
    return added


def _field(token: object, name: str) -> Any:
    return token.get(name) if isinstance(token, Mapping) else None
