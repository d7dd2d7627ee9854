from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.serving.api.responses.answer import ThoughtTokens
from shortfin_apps.llm.serving.text.tokenizer import LONG_TEXT
from tests.serving.api.harness import TOKENIZER


def count(texts: list[str]) -> int:
    counter = ThoughtTokens(TOKENIZER)
    for text in texts:
        counter.push(text)
    return counter.num_tokens


@given(st.lists(st.text(max_size=20), max_size=5), st.integers(0, 2 * LONG_TEXT))
def test_the_number_is_the_same_however_the_text_comes(texts: list[str], more: int) -> None:
    texts = [*texts, "the " * more]
    assert count(texts) == count(["".join(texts)])


def test_short_thoughts_are_tokenised_as_they_are() -> None:
    assert count(["the ", "end"]) == len(TOKENIZER.encode("the end", add_special_tokens=False))
    assert count([]) == 0
