"""Compares tokenizers with llama.cpp's ids for texts in many scripts, which tests/golden has as hashes."""

from __future__ import annotations

import json

import pytest

from shortfin_apps.llm.builder.sources.word_rules import WORD_RULES
from tests.golden.tokenizer_corpus import NUM_TEXTS, texts
from tests.golden.tokenizer_vocabularies import GOLDEN, SPACE_PREFIX, hashes, names_of_rules, own_ids

RECORDED = json.loads(GOLDEN.read_text(encoding="utf-8"))["ids"]
# Here ours are as the models' own tokenizer.json. llama.cpp matches DeepSeek's patterns with every space
# beyond ASCII replaced by another character, its patterns of gpt-4o and tekken know no combining marks and
# look for capitals only in ASCII, and that of superbpe groups only ASCII digits.
NOT_LLAMA_CPPS = {"deepseek-coder", "deepseek-llm", "gpt-4o", "tekken", "superbpe"}


@pytest.mark.parametrize("name", [*SPACE_PREFIX, *names_of_rules()])
def test_ids_are_llama_cpps(name: str) -> None:
    differ = set(RECORDED[name]["differ"])
    assert bool(differ) == (name in NOT_LLAMA_CPPS)
    assert hashes(own_ids(name), differ) == RECORDED[name]["hashes"]


@pytest.mark.parametrize("name", sorted(NOT_LLAMA_CPPS))
def test_only_texts_beyond_ascii_differ_from_llama_cpps(name: str) -> None:
    corpus, differ = texts(), RECORDED[name]["differ"]
    assert len(differ) < NUM_TEXTS / 5
    assert not any(corpus[index].isascii() for index in differ)


def test_texts_are_those_that_were_recorded() -> None:
    corpus = texts()
    assert len(corpus) == NUM_TEXTS
    assert corpus == texts()
    assert {char for text in corpus for char in text} > set(" \n9aZéßжש한日あ१😀")


def words(name: str, text: str) -> list[str]:
    splits = WORD_RULES[name].pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in splits]


@pytest.mark.parametrize(
    ("name", "text", "cut"),
    [
        ("granite-docling", "Don'T 1234\n", ["Don", "'T", " ", "123", "4", "\n"]),
        ("gpt-4o", "camelCase don't DON'T XMLs", ["camel", "Case", " don't", " DON'T", " XMLs"]),
        ("gpt-4o", "क्षि 1234", ["क्षि", " ", "123", "4"]),
        ("llama4", "a/b\n/c", ["a", "/b", "\n", "/c"]),
        ("tekken", "don't 12", ["don", "'t", " ", "1", "2"]),
        ("qwen2", "Don'T 12\r\n", ["Don", "'T", " ", "1", "2", "\r\n"]),
        ("deepseek-v3", "1234日本語x $9", ["123", "4", "日本語", "x", " $", "9"]),
        ("falcon", "`x` 1234", ["`", "x", "`", " ", "123", "4"]),
        ("seed-coder", "x();\n\n12", ["x", "();", "\n\n", "1", "2"]),
        ("minicpm5", "Don't 1234", ["Don", "'t", " ", "123", "4"]),
        ("superbpe", "by the way 1234567 of", ["by the way ", "1", "234", "567", " of"]),
        ("superbpe", "१२३४", ["१", "२३४"]),
        ("viking", "(a, b) c12.", ["(", "a", ",", " b", ")", " c", "1", "2", "."]),
    ],
)
def test_words_of_the_models_own_patterns(name: str, text: str, cut: list[str]) -> None:
    assert words(name, text) == cut
