"""Prompt lookup proposes what followed before, as long as it is right."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.speculation import prompt_lookup
from shortfin_apps.llm.components.speculation.prompt_lookup import (
    Match,
    NgramIndex,
    PromptLookup,
    continuation,
)

TEXT = list(range(100, 130))


def test_a_repeated_text_is_proposed_as_it_went_on() -> None:
    lookup = PromptLookup(8)
    assert lookup.propose([*TEXT, 7, *TEXT[:20]], 0.1, 5) == TEXT[20:25]


def test_a_new_text_gets_nothing() -> None:
    lookup = PromptLookup(8)
    assert lookup.propose(TEXT, 0.0, 5) == []


def test_there_is_no_room_for_less_than_one_token() -> None:
    lookup = PromptLookup(8)
    assert lookup.propose([*TEXT, *TEXT[:20]], 0.0, 0) == []
    assert lookup.propose([*TEXT, *TEXT[:20]], 0.0, -1) == []


def test_fewer_are_proposed_after_mistakes() -> None:
    lookup, seen = PromptLookup(8), [*TEXT, *TEXT[:20]]
    counts = []
    while count := len(lookup.propose(seen, 0.3, 8)):
        counts.append(count)
        lookup.observe(count, 0)
    assert counts[0] == 8
    assert counts == sorted(counts, reverse=True)


def test_no_more_are_proposed_than_it_may() -> None:
    assert PromptLookup(3).propose([*TEXT, *TEXT[:20]], 0.0, 8) == TEXT[20:23]


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
        patch.setattr(prompt_lookup, "WINDOW_TOKENS", window)
        patch.setattr(prompt_lookup, "CHAIN_LENGTH", chain)
        patch.setattr(prompt_lookup, "LONGEST_MATCH", longest)
        index = NgramIndex()
        for stop in range(1, len(sequence) + 1):
            seen = sequence[:stop]
            assert index.longest_match(seen) == searched(seen, window, chain, longest)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_lookup, "WINDOW_TOKENS", 64)
    index, token_ids = NgramIndex(), list[int]()
    for token_id in range(1000):
        token_ids.append(token_id)
        index.longest_match(token_ids)
    assert len(index._latest) <= 64
    assert len(index._earlier) <= 64


def test_a_long_prompt_is_added_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_lookup, "ADDED_AT_ONCE", 10)
    index, prompt = NgramIndex(), [*range(20), 0, 1]
    assert index.longest_match(prompt) is None
    assert index.longest_match(prompt) == Match(2, 2)


def test_a_sequence_goes_on_with_what_is_proposed() -> None:
    assert continuation([1, 2, 3, 4], 1, 2) == [2, 3]
    assert continuation([7, 1, 2, 1, 2], 3, 5) == [1, 2, 1, 2, 1]
    assert continuation([5, 5], 1, 4) == [5, 5, 5, 5]
    assert continuation([1, 2], 1, 0) == []
