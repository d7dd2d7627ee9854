"""The index finds what a search of the whole sequence finds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.speculation import ngrams
from shortfin_apps.llm.components.speculation.ngrams import Match, NgramIndex, continuation

SEQUENCES = st.lists(st.integers(0, 3), min_size=1, max_size=60) | st.lists(
    st.integers(0, 1 << 31), max_size=40
)


def searched(token_ids: list[int], window: int, chain: int, longest: int) -> Match | None:
    """The longest match among the latest `chain` places of the last pair, the latest of equal ones."""
    last = len(token_ids) - 1
    found = [
        position
        for position in range(last - 1, max(0, last - window), -1)
        if token_ids[position - 1 : position + 1] == token_ids[last - 1 :]
    ][:chain]
    best = None
    for position in found:
        length = 2
        while (
            length < min(longest, position + 1) and token_ids[position - length] == token_ids[last - length]
        ):
            length += 1
        if best is None or length > best.length:
            best = Match(position + 1, length)
    return best


@given(sequence=SEQUENCES, window=st.integers(3, 50), chain=st.integers(1, 6), longest=st.integers(2, 12))
def test_matches_are_those_of_a_search(sequence: list[int], window: int, chain: int, longest: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngrams, "WINDOW_TOKENS", window)
        patch.setattr(ngrams, "CHAIN_LENGTH", chain)
        patch.setattr(ngrams, "LONGEST_MATCH", longest)
        index = NgramIndex()
        for stop in range(1, len(sequence) + 1):
            seen = sequence[:stop]
            assert index.longest_match(seen) == searched(seen, window, chain, longest)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngrams, "WINDOW_TOKENS", 64)
    index, token_ids = NgramIndex(), list[int]()
    for token_id in range(1000):
        token_ids.append(token_id)
        index.longest_match(token_ids)
    assert len(index._latest) <= 64
    assert len(index._earlier) <= 64


def test_a_long_prompt_is_added_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngrams, "ADDED_AT_ONCE", 10)
    index, prompt = NgramIndex(), [*range(20), 0, 1]
    assert index.longest_match(prompt) is None
    assert index.longest_match(prompt) == Match(2, 2)


def test_a_sequence_goes_on_with_what_is_proposed() -> None:
    assert continuation([1, 2, 3, 4], 1, 2) == [2, 3]
    assert continuation([7, 1, 2, 1, 2], 3, 5) == [1, 2, 1, 2, 1]
    assert continuation([5, 5], 1, 4) == [5, 5, 5, 5]
    assert continuation([1, 2], 1, 0) == []
