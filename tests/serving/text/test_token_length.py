from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from shortfin_apps.llm.serving.text.token_length import ALPHABET, TokenLength
from tests.serving.text.tiny_tokenizers import byte_level_backend, sentencepiece_backend

ALPHA = "\u03b1\u0313\u0300\u0345"  # NFC makes one character of these four
PIECES = ["a", "the", " the", " ", "\u00a0\n", ALPHA, "\u1f82", "€", "😀", "<|x|>", "<|begin|>", "\x04\x06"]


def normalized(*steps: Any) -> tokenizers.Tokenizer:
    """The longest token has 9 characters: <|begin|>."""
    backend = byte_level_backend()
    backend.normalizer = normalizers.Sequence(list(steps))
    return backend


def pre_tokenized(*steps: Any) -> tokenizers.Tokenizer:
    backend = byte_level_backend()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return backend


def stripping() -> tokenizers.Tokenizer:
    backend = byte_level_backend()
    backend.add_special_tokens([AddedToken("<|x|>", rstrip=True)])
    return backend


def without(*names: str) -> tokenizers.Tokenizer:
    """A byte-level model without these bytes in its vocabulary, which drops them from texts."""
    backend = byte_level_backend()
    state = json.loads(backend.to_str())
    for name in names:
        del state["model"]["vocab"][name]
    return tokenizers.Tokenizer.from_str(json.dumps(state))


BOUNDED = {
    "byte-level": (byte_level_backend(), 9),
    "sentencepiece": (sentencepiece_backend(), 6),
    "metaspace": (sentencepiece_backend("metaspace"), 6),
    "nfc": (normalized(normalizers.NFC()), 36),
    "nfkc": (normalized(normalizers.NFKC(), normalizers.Lowercase()), 36),
    "nfd": (normalized(normalizers.NFD()), 9),
    "halving": (normalized(normalizers.Replace("aaa", "xx")), 18),
    "widening": (normalized(normalizers.Replace("a", "xx"), normalizers.Prepend("_")), 9),
    "byte-level normalizer": (normalized(normalizers.ByteLevel()), 9),
    "split": (pre_tokenized(pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.Digits()), 9),
    "stripping": (stripping(), 9),
    "no control characters": (without(chr(0x104), chr(0x106), "\u00f1", "\u00f2"), 9),
}
UNBOUNDED = {
    "no bytes": tokenizers.Tokenizer(models.BPE()),
    "words": tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
    "no continuation": without("\u00bf"),
    "deleting": normalized(normalizers.Replace("a", "")),
    "pattern": normalized(normalizers.Replace(Regex("a+"), "a")),
    "strip": normalized(normalizers.Strip()),
    "accents": normalized(normalizers.NFD(), normalizers.StripAccents()),
    "removing": pre_tokenized(pre_tokenizers.Split(" ", "removed")),
    "whitespace": pre_tokenized(pre_tokenizers.WhitespaceSplit()),
}


@pytest.mark.parametrize(("backend", "most"), BOUNDED.values(), ids=BOUNDED.keys())
def test_the_longest_token_bounds_a_text(backend: tokenizers.Tokenizer, most: int) -> None:
    length = TokenLength(backend)
    assert length.max_chars == most
    assert length.fewest_tokens("x" * (10 * most)) == 10
    assert length.fewest_tokens("x" * (10 * most + 1)) == 11
    assert length.fewest_tokens("") == 0


@pytest.mark.parametrize("backend", UNBOUNDED.values(), ids=UNBOUNDED.keys())
def test_there_is_no_bound_if_text_may_be_dropped(backend: tokenizers.Tokenizer) -> None:
    assert TokenLength(backend).max_chars is None
    assert TokenLength(backend).fewest_tokens("x" * 1_000_000) == 0


@pytest.mark.parametrize(
    "backend",
    [*UNBOUNDED.values(), *(backend for backend, _ in BOUNDED.values())],
    ids=[*UNBOUNDED, *BOUNDED],
)
@given(pieces=st.lists(st.sampled_from(PIECES) | st.text(max_size=3)))
def test_no_text_has_fewer_tokens(backend: tokenizers.Tokenizer, pieces: list[str]) -> None:
    text = "".join(pieces)
    num_tokens = len(backend.encode(text, add_special_tokens=False).ids)
    assert TokenLength(backend).fewest_tokens(text) <= num_tokens


def test_the_alphabet_equals_the_librarys() -> None:
    assert sorted(ALPHABET) == sorted(pre_tokenizers.ByteLevel.alphabet())
    for byte in range(128):
        [(name, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(chr(byte))
        assert name == ALPHABET[byte]


def test_characters_that_the_model_drops_do_not_count() -> None:
    backend = without(chr(0x104))
    text = "\x04" * 1000 + "x"
    assert len(backend.encode(text).ids) == 1
    assert TokenLength(backend).fewest_tokens(text) == 1


def test_replacements_that_are_dropped_do_not_count() -> None:
    backend = without(chr(0x104))
    backend.normalizer = normalizers.Replace("a", "\x04")
    assert TokenLength(backend).max_chars is None


def test_space_beside_tokens_that_strip_it_does_not_count() -> None:
    backend = stripping()
    text = "<|x|>" + " \u3000\n" * 100
    assert len(backend.encode(text).ids) == 1
    assert TokenLength(backend).fewest_tokens(text) == 1
