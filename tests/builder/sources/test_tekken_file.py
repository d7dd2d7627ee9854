from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from shortfin_apps.llm.builder.sources.gguf_tokenizer import rebuild_tokenizer
from shortfin_apps.llm.builder.sources.tekken_file import RULES, tekken_vocabulary
from shortfin_apps.llm.builder.sources.word_rules import WORD_RULES
from shortfin_apps.llm.contract.errors import BuildError
from tests.golden.tokenizer_corpus import texts
from tests.golden.tokenizer_vocabularies import GOLDEN

NUM_SPECIAL = 24
PATTERN = WORD_RULES[RULES].patterns[0]
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = json.loads(GOLDEN.read_text(encoding="utf-8"))["merges"]
RANKED = list(dict.fromkeys([*LETTERS, *(merge.replace(" ", "") for merge in MERGES)]))
FIELDS = {"pattern": PATTERN, "default_num_special_tokens": NUM_SPECIAL, "version": "v7"}


def bytes_of(piece: str) -> bytes:
    """Of a token in GPT-2's alphabet."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    values = {chr(byte): byte for byte in printable} | {chr(256 + n): b for n, b in enumerate(others)}
    return bytes(values[letter] for letter in piece)


def write_tekken(
    folder: Path, fields: Mapping[str, Any] | None = None, size: int = NUM_SPECIAL + len(RANKED)
) -> Path:
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(bytes_of(piece)).decode(), "token_str": None}
        for rank, piece in enumerate(RANKED)
    ]
    path = folder / "tekken.json"
    config = {**FIELDS, "default_vocab_size": size}
    path.write_text(json.dumps({"config": config, "vocab": vocab, **(fields or {})}), encoding="utf-8")
    return path


def merged(word: str) -> list[str]:
    """By its definition: the pair whose concatenation has the lowest rank is merged first."""
    ranks = {piece: rank for rank, piece in enumerate(RANKED)}
    parts = list(word)
    while True:
        pairs = [(ranks.get(parts[i] + parts[i + 1]), i) for i in range(len(parts) - 1)]
        known = [(rank, i) for rank, i in pairs if rank is not None]
        if not known:
            return parts
        _, at = min(known)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_ids_are_those_of_merges_by_rank(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(
        rebuild_tokenizer("x", tekken_vocabulary(write_tekken(tmp_path))).tokenizer
    )
    words = WORD_RULES[RULES].pre_tokenizer
    plain = [text for text in texts()[:400] if "<" not in text and "[" not in text]
    assert len(plain) > 100
    for text in plain:
        expected = [
            NUM_SPECIAL + RANKED.index(piece)
            for word, _ in words.pre_tokenize_str(text)
            for piece in ([word] if word in RANKED else merged(word))
        ]
        assert tokenizer.encode(text, add_special_tokens=False).ids == expected, text
        assert tokenizer.decode(expected) == text


def test_special_tokens_come_first(tmp_path: Path) -> None:
    files = rebuild_tokenizer("x", tekken_vocabulary(write_tekken(tmp_path)))
    tokenizer = Tokenizer.from_str(files.tokenizer)
    assert tokenizer.encode("[INST]a[/INST]").ids == [1, 3, NUM_SPECIAL + RANKED.index("a"), 4]
    assert tokenizer.id_to_token(NUM_SPECIAL - 1) == f"<SPECIAL_{NUM_SPECIAL - 1}>"
    assert files.config["pad_token"] == "<pad>"
    assert files.generation["eos_token_id"] == [2]


def test_a_file_may_list_its_special_tokens(tmp_path: Path) -> None:
    listed: Sequence[Mapping[str, Any]] = [
        {"rank": 1, "token_str": "<s>", "is_control": True},
        {"rank": 0, "token_str": "</s>", "is_control": True},
        {"rank": 2, "token_str": "[THINK]", "is_control": False},
    ]
    vocabulary = tekken_vocabulary(write_tekken(tmp_path, {"special_tokens": listed}))
    assert vocabulary.tokens[:4] == ["</s>", "<s>", "[THINK]", "<SPECIAL_3>"]
    assert vocabulary.token_type[:4] == [3, 3, 4, 3]
    assert (vocabulary.bos_token_id, vocabulary.eos_token_id, vocabulary.unk_token_id) == (1, 0, None)


def test_tokens_beyond_the_size_of_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    vocabulary = tekken_vocabulary(write_tekken(tmp_path, size=NUM_SPECIAL + 256))
    assert len(vocabulary.tokens) == NUM_SPECIAL + 256
    assert vocabulary.merges == []


TWICE = [{"rank": rank, "token_str": "<s>"} for rank in range(2)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"config": {**FIELDS, "default_vocab_size": 300, "pattern": r"\w+"}}, "is not Tekken's"),
        ({"config": FIELDS}, "`config.default_vocab_size`"),
        ({"vocab": [{"token_bytes": "?"}]}, "is not base64"),
        ({"special_tokens": TWICE}, f"are not {NUM_SPECIAL} different tokens"),
        ({"special_tokens": [{"rank": NUM_SPECIAL, "token_str": "<s>"}]}, "different tokens"),
    ],
)
def test_what_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        tekken_vocabulary(write_tekken(tmp_path, fields))
