"""The small vocabularies of tokenizer_ids.json, and what our tokenizers make of the texts with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from shortfin_apps.llm.builder.sources.gguf_tokenizer import GgufVocabulary, rebuild_tokenizer
from shortfin_apps.llm.builder.sources.word_rules import WORD_RULES
from tests.golden.tokenizer_corpus import texts

GOLDEN = Path(__file__).with_name("tokenizer_ids.json")
BLOCK = 100  # texts of one hash
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
SPACE_PREFIX = {"sentence-piece": True, "sentence-piece-without-prefix": False}

Ids = Sequence[Sequence[int]]  # of each text


def names_of_rules() -> list[str]:
    """One name of each rule for words."""
    return list({rules: name for name, rules in reversed(WORD_RULES.items())}.values())


def own_ids(name: str) -> Ids:
    """The ids of the texts by the tokenizer that is rebuilt from the vocabulary `name`, without BOS."""
    files = rebuild_tokenizer(name, GgufVocabulary.model_validate(keys_of(name)))
    tokenizer = Tokenizer.from_str(files.tokenizer)
    return [encoding.ids for encoding in tokenizer.encode_batch(texts(), add_special_tokens=False)]


def hashes(ids: Ids, left_out: Collection[int]) -> list[str]:
    """A hash of each block of texts without those left out, by their index."""
    kept = [[] if index in left_out else list(text) for index, text in enumerate(ids)]
    blocks = [kept[start : start + BLOCK] for start in range(0, len(kept), BLOCK)]
    return [hashlib.sha256(json.dumps(block).encode()).hexdigest()[:8] for block in blocks]


def keys_of(name: str) -> dict[str, Any]:
    """The `tokenizer.*` keys, without the prefix, of a vocabulary with the pre-tokeniser `name`."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    if name in SPACE_PREFIX:
        return _sentence_piece_keys(golden["pieces"], SPACE_PREFIX[name])
    return _byte_level_keys(name, golden["merges"])


def _byte_level_keys(pre: str, merges: Sequence[str]) -> dict[str, Any]:
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges)]
    tokens = list(dict.fromkeys(pieces))
    return {
        "ggml.model": "gpt2",
        "ggml.pre": pre,
        "ggml.tokens": [*tokens, "<|begin|>", "<|end|>"],
        "ggml.token_type": [NORMAL] * len(tokens) + [CONTROL] * 2,
        "ggml.merges": list(merges),
        "ggml.bos_token_id": len(tokens),
        "ggml.eos_token_id": len(tokens) + 1,
    }


def _sentence_piece_keys(pieces: Sequence[str], space_prefix: bool) -> dict[str, Any]:
    """Llama 2's layout: unknown, begin, end, the bytes, then pieces, the best first."""
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    return {
        "ggml.model": "llama",
        "ggml.tokens": ["<unk>", "<s>", "</s>", *bytes_, *pieces],
        "ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces),
        "ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))],
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
        "ggml.add_space_prefix": space_prefix,
    }
