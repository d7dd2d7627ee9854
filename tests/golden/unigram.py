"""The unigram vocabularies of unigram_ids.json, and what our tokenizers make of the texts with them."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from shortfin_apps.llm.builder.sources.gguf_tokenizer import GgufVocabulary, rebuild_tokenizer
from tests.golden.tokenizer_corpus import texts
from tests.golden.tokenizer_vocabularies import Ids

GOLDEN = Path(__file__).with_name("unigram_ids.json")
# What becomes of characters, each with whether spaces are removed.
NORMALISATIONS = {"identity": False, "widths": True}


def plain_texts() -> list[str]:
    """Without the names of special tokens, which SentencePiece takes for text."""
    return [re.sub(r"</?s>|<unk>|<\|end\|>", "", text) for text in texts()]


def unigram_keys(rule: str) -> dict[str, Any]:
    """The metadata of a GGUF file, below `tokenizer.`."""
    recorded = json.loads(GOLDEN.read_text(encoding="utf-8"))[rule]
    charsmap = zlib.decompress(base64.b64decode(recorded["charsmap"]))
    return {
        "ggml.model": "t5",
        "ggml.tokens": recorded["tokens"],
        "ggml.scores": recorded["scores"],
        "ggml.token_type": recorded["types"],
        "ggml.unknown_token_id": 0,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.remove_extra_whitespaces": NORMALISATIONS[rule],
        "ggml.precompiled_charsmap": list(charsmap),
    }


def own_unigram_ids(rule: str) -> Ids:
    files = rebuild_tokenizer(rule, GgufVocabulary.model_validate(unigram_keys(rule)))
    tokenizer = Tokenizer.from_str(files.tokenizer)
    return [each.ids for each in tokenizer.encode_batch(plain_texts(), add_special_tokens=False)]
