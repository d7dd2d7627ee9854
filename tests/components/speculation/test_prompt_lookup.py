"""Prompt lookup proposes what followed before, as long as it is right."""

from __future__ import annotations

from shortfin_apps.llm.components.speculation.prompt_lookup import PromptLookup

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
