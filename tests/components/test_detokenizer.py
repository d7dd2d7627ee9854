from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shortfin_apps.llm.components.detokenizer import MAX_WINDOW, Detokenizer, StopMatcher
from shortfin_apps.llm.components.tokenizer import Tokenizer
from tests.components.tiny_tokenizers import EOS, byte_fallback_tokenizer, byte_level_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()
NUM_IDS = BYTE_LEVEL.vocab_size + 3  # a model's head may be wider than its vocabulary


def pieces_of(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


@given(st.lists(st.integers(0, NUM_IDS)), st.booleans())
@example([BYTE_LEVEL.encode("€")[0]] * 40, True)
def test_pieces_join_to_the_whole_for_any_tokens(ids: list[int], skip: bool) -> None:
    pieces = pieces_of(BYTE_LEVEL, ids, skip_special_tokens=skip)
    assert "".join(pieces) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])
@given(text=st.text(st.one_of(st.sampled_from("the an€😀é\u200d"), st.characters(codec="utf-8"))))
def test_pieces_of_a_text_are_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text.replace("\ufffd", "?"))
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_waits_for_its_last_token() -> None:
    ids = BYTE_LEVEL.encode("a😀b")
    assert len(ids) > 3
    assert [piece for piece in pieces_of(BYTE_LEVEL, ids) if piece] == ["a", "😀", "b"]


def test_the_window_stays_small() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)
    broken = BYTE_LEVEL.encode("é")[1]
    for token_id in [broken] * 100 + BYTE_LEVEL.encode("the " * 100):
        detokenizer.push(token_id)
        assert len(detokenizer._window) <= MAX_WINDOW


def test_an_unfinished_character_ends_as_the_replacement_character() -> None:
    assert pieces_of(BYTE_LEVEL, BYTE_LEVEL.encode("€")[:1]) == ["", "\ufffd"]


def test_special_tokens_show_only_when_asked_for() -> None:
    ids = BYTE_LEVEL.encode(f"a{EOS}b")
    assert "".join(pieces_of(BYTE_LEVEL, ids)) == "ab"
    assert "".join(pieces_of(BYTE_LEVEL, ids, skip_special_tokens=False)) == f"a{EOS}b"


def first_match(text: str, stops: list[str]) -> tuple[int, int] | None:
    """Brute force: read on until some stop string is complete; the longest of those."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts), end
    return None


@given(
    pieces=st.lists(st.text("ab€", max_size=4)),
    stops=st.lists(st.text("ab€", min_size=1, max_size=4), max_size=4),
    include=st.booleans(),
)
def test_stop_strings_do_not_depend_on_the_pieces(pieces: list[str], stops: list[str], include: bool) -> None:
    matcher = StopMatcher(stops, include_match=include)
    text = "".join(pieces)
    match = first_match(text, stops)
    expected = text if match is None else text[: match[1] if include else match[0]]
    out = ""
    for piece in pieces:
        out += matcher.push(piece)
        assert expected.startswith(out)
    assert out + matcher.finish() == expected
    assert matcher.matched == (None if match is None else text[match[0] : match[1]])


def test_text_is_held_only_while_undecided() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in ("aE", "N", "x", "EN", "D!")] == ["a", "", "ENx", "", ""]
    assert matcher.matched == "END"


def test_empty_stop_strings_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher([""])
