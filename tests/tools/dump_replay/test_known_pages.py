from __future__ import annotations

from shortfin_apps.llm.tools.dump_replay.known_pages import Held, KnownPages

TOKENS = [1, 2, 3, 4, 5, 6]


def test_pages_are_known_by_the_tokens_up_to_theirs() -> None:
    pages = KnownPages(stride=4)
    assert pages.held([7, 8], TOKENS, 0) == [(0, Held.UNKNOWN), (1, Held.UNKNOWN)]
    pages.wrote([7, 8], TOKENS, 0, is_known=True)
    assert pages.held([7, 8], TOKENS, 0) == [(0, Held.SAME), (1, Held.SAME)]
    assert pages.held([7, 8], TOKENS[:5], 1) == [(1, Held.SAME)]
    assert pages.held([7, 8], [*TOKENS, 9], 0) == [(0, Held.SAME), (1, Held.OTHER)]
    assert pages.held([7, 8], [9, *TOKENS[1:]], 0) == [(0, Held.OTHER), (1, Held.OTHER)]


def test_a_state_is_of_exactly_its_tokens() -> None:
    pages = KnownPages(stride=4, is_exact=True)
    pages.wrote([7, 8], TOKENS, 0, is_known=True)
    assert pages.held([7, 8], TOKENS, 1) == [(1, Held.SAME)]
    assert pages.held([7, 8], TOKENS[:5], 1) == [(1, Held.OTHER)]


def test_what_was_computed_from_unknown_pages_is_unknown() -> None:
    pages = KnownPages(stride=4)
    pages.wrote([7], TOKENS[:4], 0, is_known=False)
    assert pages.held([7], TOKENS[:4], 0) == [(0, Held.UNKNOWN)]


def test_a_rejected_token_is_written_over() -> None:
    pages = KnownPages(stride=4)
    pages.wrote([7], [1, 2, 9], 0, is_known=True)
    pages.wrote([7], [1, 2, 3], 2, is_known=True)
    assert pages.held([7], [1, 2, 3], 0) == [(0, Held.SAME)]


def test_zeroed_pages_are_unknown() -> None:
    pages = KnownPages(stride=4)
    pages.wrote([7], TOKENS[:4], 0, is_known=True)
    pages.forget([7, 99])
    assert pages.held([7], TOKENS[:4], 0) == [(0, Held.UNKNOWN)]
