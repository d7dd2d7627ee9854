from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.builder.sources.gguf_tokenizer import GgufVocabulary, rebuild_tokenizer
from shortfin_apps.llm.builder.sources.sentencepiece_file import sentencepiece_vocabulary
from shortfin_apps.llm.contract.errors import BuildError
from tests.builder.sources.sentencepiece_data import sentencepiece_model
from tests.golden.tokenizer_vocabularies import CONTROL, UNKNOWN, keys_of
from tests.golden.unigram import unigram_keys

USER_DEFINED = 4
FEW = [
    ("<unk>", 0.0, UNKNOWN),
    ("<s>", 0.0, CONTROL),
    ("</s>", 0.0, CONTROL),
    ("▁a", -1.5, 1),
    ("▁", -2.0, 1),
    ("a", -3.0, 1),
]


def written(folder: Path, keys: dict[str, Any], trainer: dict[int, Any], normalizer: dict[int, Any]) -> Path:
    path = folder / "tokenizer.model"
    names = ("ggml.tokens", "ggml.scores", "ggml.token_type")
    pieces = list(zip(*(keys[name] for name in names), strict=True))
    path.write_bytes(sentencepiece_model(pieces, trainer, normalizer))
    return path


@pytest.mark.parametrize("name", ["sentence-piece", "sentence-piece-without-prefix"])
def test_a_bpe_is_read_as_from_a_gguf_file(tmp_path: Path, name: str) -> None:
    """Whose token ids are known to be SentencePiece's (test_gguf_tokenizer.py)."""
    keys = keys_of(name)
    path = written(tmp_path, keys, {}, {3: int(keys["ggml.add_space_prefix"])})
    expected = rebuild_tokenizer("x", GgufVocabulary.model_validate(keys))
    assert rebuild_tokenizer("x", sentencepiece_vocabulary(path, {})) == expected


@pytest.mark.parametrize("rule", ["identity", "widths"])
def test_a_unigram_model_is_read_as_from_a_gguf_file(tmp_path: Path, rule: str) -> None:
    keys = unigram_keys(rule)
    keys["ggml.scores"] = [float(np.float32(score)) for score in keys["ggml.scores"]]
    charsmap, removes = bytes(keys["ggml.precompiled_charsmap"]), keys["ggml.remove_extra_whitespaces"]
    path = written(tmp_path, keys, {3: 1}, {2: charsmap, 4: int(removes)})
    expected = rebuild_tokenizer("x", GgufVocabulary.model_validate(keys))
    rebuilt = rebuild_tokenizer("x", sentencepiece_vocabulary(path, {}))
    assert rebuilt.tokenizer == expected.tokenizer


def test_added_tokens_extend_or_replace_pieces(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(sentencepiece_model([*FEW, ("<unused>", 0.0, USER_DEFINED)], {43: 6}))
    added = {0: ("<unk>", True), 6: ("[PAD]", True), 8: ("<tool>", False), 7: ("<|end|>", True)}
    vocabulary = sentencepiece_vocabulary(path, added)
    assert vocabulary.tokens == ["<unk>", "<s>", "</s>", "▁a", "▁", "a", "[PAD]", "<|end|>", "<tool>"]
    assert vocabulary.token_type == [UNKNOWN, *[CONTROL] * 2, *[1] * 3, *[CONTROL] * 2, USER_DEFINED]
    assert (vocabulary.bos_token_id, vocabulary.eos_token_id, vocabulary.pad_token_id) == (1, 2, 6)


def test_a_token_id_of_minus_one_is_none(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(sentencepiece_model(FEW, {41: -1}))
    vocabulary = sentencepiece_vocabulary(path, {})
    assert (vocabulary.bos_token_id, vocabulary.eos_token_id, vocabulary.pad_token_id) == (None, 2, None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it has no pieces"),
        (b"no protocol buffer", "is not a SentencePiece model"),
        (sentencepiece_model(FEW)[:-3], "is not a SentencePiece model"),
        (
            sentencepiece_model(FEW, {3: 4}),
            "is neither BPE nor unigram; save the model with its fast tokenizer",
        ),
        (sentencepiece_model(FEW, {}, {4: 1}), "normalises the text before BPE"),
        (sentencepiece_model(FEW, {}, {2: b"\0\0\0\0"}), "normalises the text before BPE"),
    ],
)
def test_what_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(BuildError, match=message):
        sentencepiece_vocabulary(path, {})


def test_added_tokens_leave_no_gap(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(sentencepiece_model(FEW))
    with pytest.raises(BuildError, match="has 6 pieces, but `<x>` is added as 8"):
        sentencepiece_vocabulary(path, {8: ("<x>", True)})


@given(content=st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("x") / "tokenizer.model"
    path.write_bytes(sentencepiece_model(FEW)[:20] + content)
    with suppress(BuildError):
        assert sentencepiece_vocabulary(path, {}).tokens
