from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import SupportsIndex

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shortfin_apps.llm.serving.text.detokenizer import MAX_WINDOW, Detokenizer, StopMatcher
from shortfin_apps.llm.serving.text.tokenizer import Tokenizer
from tests.serving.text.tiny_tokenizers import (
    EOS,
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    sentencepiece_tokenizer,
)

BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()
NUM_IDS = BYTE_LEVEL.vocab_size + 3  # a model's head may be wider than its vocabulary
with tempfile.TemporaryDirectory() as folder:
    LLAMA_2 = sentencepiece_tokenizer(Path(folder))
    METASPACE = sentencepiece_tokenizer(Path(folder), "metaspace")
    METASPACE_DECODER = sentencepiece_tokenizer(Path(folder), "metaspace decoder")
SENTENCEPIECE = {"llama 2": LLAMA_2, "metaspace": METASPACE, "metaspace decoder": METASPACE_DECODER}
ALL = {"byte-level": BYTE_LEVEL, "byte-fallback": BYTE_FALLBACK, **SENTENCEPIECE}


def pieces_of(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    prompt_token_ids: Sequence[int] = (),
    skip_special_tokens: bool = True,
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


@given(st.lists(st.integers(0, NUM_IDS)), st.booleans())
@example([BYTE_LEVEL.encode("€")[0]] * 40, True)
def test_pieces_of_any_tokens_join_to_the_decoded_text(ids: list[int], skip: bool) -> None:
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


def test_an_incomplete_character_ends_as_the_replacement_character() -> None:
    assert pieces_of(BYTE_LEVEL, BYTE_LEVEL.encode("€")[:1]) == ["", "\ufffd"]


def test_special_tokens_are_kept_on_request() -> None:
    ids = BYTE_LEVEL.encode(f"a{EOS}b")
    assert "".join(pieces_of(BYTE_LEVEL, ids)) == "ab"
    assert "".join(pieces_of(BYTE_LEVEL, ids, skip_special_tokens=False)) == f"a{EOS}b"


@pytest.mark.parametrize("tokenizer", SENTENCEPIECE.values(), ids=SENTENCEPIECE.keys())
def test_the_first_word_after_a_prompt_keeps_its_space(tokenizer: Tokenizer) -> None:
    [_, *prompt_token_ids, world] = tokenizer.encode("hello world")
    assert pieces_of(tokenizer, [world, world], prompt_token_ids=prompt_token_ids) == [" world", " world", ""]
    assert pieces_of(tokenizer, [world], prompt_token_ids=[*prompt_token_ids, *tokenizer.encode("")]) == [
        " world",
        "",
    ]
    assert pieces_of(tokenizer, [world], prompt_token_ids=tokenizer.encode("")) == ["world", ""]
    assert pieces_of(tokenizer, [world]) == ["world", ""]


@pytest.mark.parametrize("tokenizer", ALL.values(), ids=ALL.keys())
@given(text=st.text(st.sampled_from("the hello worldan€😀é\u200d,.\n")), data=st.data())
@example(text="", data=None)
def test_prompt_and_answer_join_to_the_decoded_text(
    tokenizer: Tokenizer, text: str, data: st.DataObject | None
) -> None:
    ids = tokenizer.encode(text)
    cut = 0 if data is None else data.draw(st.integers(0, len(ids)))
    prompts, whole = [tokenizer.decode(ids[:end]) for end in range(cut + 1)], tokenizer.decode(ids)
    # A character split by the cut belongs to the answer.
    prompt = [prompt for prompt in prompts if whole.startswith(prompt)][-1]
    assert prompt + "".join(pieces_of(tokenizer, ids[cut:], prompt_token_ids=ids[:cut])) == whole


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, LLAMA_2], ids=["byte-level", "llama 2"])
def test_a_character_begun_in_the_prompt_is_in_the_answer(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a😀😀b")
    cut = len(tokenizer.encode("a😀")) + 2
    assert "".join(pieces_of(tokenizer, ids[cut:], prompt_token_ids=ids[:cut])) == "😀b"
    [b] = ids[-1:]
    assert "".join(pieces_of(tokenizer, [b], prompt_token_ids=ids[:cut])) == "b"
    assert "".join(pieces_of(tokenizer, [], prompt_token_ids=ids[:cut])) == ""


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, LLAMA_2], ids=["byte-level", "llama 2"])
def test_replacement_characters_of_the_prompt_are_not_repeated(tokenizer: Tokenizer) -> None:
    for prompt in ("a\ufffd", "\ufffd", "\ufffd" * 20):
        answer = pieces_of(tokenizer, tokenizer.encode("b")[-1:], prompt_token_ids=tokenizer.encode(prompt))
        assert "".join(answer) == "b"


def test_tokens_without_text_at_the_prompts_end_are_skipped() -> None:
    [_, *hello] = LLAMA_2.encode("hello")
    [world] = LLAMA_2.encode("world")[1:]
    silent = [2] * 100
    assert pieces_of(LLAMA_2, [world], prompt_token_ids=[*hello, *silent]) == [" world", ""]
    shown = pieces_of(LLAMA_2, [world], prompt_token_ids=[*hello, *silent], skip_special_tokens=False)
    assert shown == [" world", ""]


@given(st.lists(st.integers(0, NUM_IDS)), st.lists(st.integers(0, NUM_IDS), max_size=40))
@example(prompt_token_ids=[126, 262], ids=[])  # a whole character, then an incomplete one
def test_any_prompt_keeps_the_text_after_it(prompt_token_ids: list[int], ids: list[int]) -> None:
    space = BYTE_LEVEL.encode(" x")  # ends whatever character the prompt began
    answer = "".join(pieces_of(BYTE_LEVEL, [*space, *ids], prompt_token_ids=prompt_token_ids))
    assert answer == BYTE_LEVEL.decode([*space, *ids])


def first_match(text: str, stops: list[str]) -> tuple[int, int] | None:
    """Brute force: the longest of the stop strings that end first."""
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


def test_only_possible_stop_strings_are_held_back() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in ("aE", "N", "x", "EN", "D!")] == ["a", "", "ENx", "", ""]
    assert matcher.matched == "END"


class Searched(str):
    """Text that counts the places at which stop strings were looked for."""

    places = 0

    def __add__(self, other: str) -> Searched:
        return Searched(str(self) + other)

    def __radd__(self, other: str) -> Searched:
        return Searched(other + str(self))

    def __getitem__(self, key: SupportsIndex | slice) -> Searched:
        return Searched(super().__getitem__(key))

    def find(self, sub: str, start: SupportsIndex | None = None, end: SupportsIndex | None = None, /) -> int:
        begin = 0 if start is None else int(start)
        Searched.places += max(0, len(self) - begin - len(sub) + 1)
        return super().find(sub, begin, end)


def test_text_that_is_held_back_is_searched_once() -> None:
    """Each look at 1,023 characters for 15 such strings takes half a millisecond."""
    stops = ["a" * 1023 + "b", *("a" * 255 + "c" + "a" * length for length in range(255, 270))]
    matcher = StopMatcher(stops)
    Searched.places = 0
    text = "".join(matcher.push(Searched("a")) for _ in range(2000))
    assert text == "a" * (2000 - 1023)
    assert Searched.places <= 2000 * len(stops)


def test_empty_stop_strings_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher([""])
