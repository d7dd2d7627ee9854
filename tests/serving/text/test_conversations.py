"""Conversations that are remembered, against a list of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.serving.text.conversations import NOTHING, Conversations, Recalled
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer
from tests.serving.text.tiny_tokenizers import byte_level_tokenizer, sentencepiece_backend

NAMES = ("<e>", "<end>")
TEXTS = st.lists(st.sampled_from(["<e>", "<end>", "a", "b", "<", "\ud800"]), max_size=8).map("".join)
SALTS = st.sampled_from([None, "x"])


def recalled_by_brute_force(
    known: dict[tuple[str | None, str], tuple[int, ...]], text: str, salt: str | None
) -> Recalled:
    """Splits as a tokenizer does: at the names from left to right, the longest first."""
    best, at = NOTHING, 0
    while at < len(text):
        name = next((n for n in ("<end>", "<e>") if text.startswith(n, at)), None)
        if name is not None and (salt, text[:at]) in known:
            best = Recalled(at, known[salt, text[:at]])
        at += len(name or " ")
    return best


@given(remembered=st.lists(st.tuples(TEXTS, SALTS), max_size=6), text=TEXTS, salt=SALTS)
def test_recalls_the_longest_beginning_that_a_name_follows(
    remembered: list[tuple[str, str | None]], text: str, salt: str | None
) -> None:
    conversations = Conversations(NAMES, 1000)
    known: dict[tuple[str | None, str], tuple[int, ...]] = {}
    for number, (each, its_salt) in enumerate(remembered):
        conversations.remember(each, [number], its_salt)
        known[its_salt, each] = (number,)
    assert conversations.recall(text, salt) == recalled_by_brute_force(known, text, salt)


def test_forgets_what_was_used_longest_ago() -> None:
    conversations = Conversations(NAMES, 5)
    conversations.remember("a", [1, 1], None)
    conversations.remember("b", [2, 2], None)
    assert conversations.recall("a<e>", None) == (1, (1, 1))
    conversations.remember("c", [3, 3], None)
    assert conversations.recall("b<e>", None) == NOTHING
    assert conversations.recall("a<e>", None) == (1, (1, 1))
    conversations.remember("d", [4] * 6, None)  # more than all
    assert conversations.recall("a<e>", None) == conversations.recall("d<e>", None) == NOTHING


def test_a_text_that_is_remembered_again_counts_once() -> None:
    conversations = Conversations(NAMES, 4)
    for _ in range(5):
        conversations.remember("a", [1, 1], None)
    conversations.remember("b", [2, 2], None)
    assert conversations.recall("a<e>", None) == (1, (1, 1))


@pytest.mark.parametrize("max_tokens", [0, 100])
def test_without_names_or_room_nothing_is_recalled(max_tokens: int) -> None:
    conversations = Conversations(() if max_tokens else NAMES, max_tokens)
    conversations.remember("a", [1], None)
    assert conversations.recall("a<e>", None) == NOTHING


@pytest.mark.parametrize(
    "tokenizer",
    [byte_level_tokenizer(), *(Tokenizer(sentencepiece_backend(form)) for form in ("prepend", "metaspace"))],
    ids=["byte-level", "prepend", "metaspace"],
)
@given(before=st.text(max_size=8), after=st.text(max_size=8), data=st.data())
def test_a_tokenizer_splits_a_text_at_its_names(
    tokenizer: Tokenizer, before: str, after: str, data: st.DataObject
) -> None:
    rest = data.draw(st.sampled_from(sorted(tokenizer.split_names))) + after
    parts = [tokenizer.encode(part, add_special_tokens=False) for part in (before, rest)]
    assert tokenizer.encode(before + rest, add_special_tokens=False) == parts[0] + parts[1]
