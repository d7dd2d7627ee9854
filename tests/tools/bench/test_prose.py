from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.tools.bench.prose import text, token_prompt, word_prompt


async def by_bytes(text: str) -> list[int]:
    return list(text.encode())


async def by_words(text: str) -> list[int]:
    return [hash(word) for word in text.split()]


@pytest.mark.parametrize("tokens", [1, 2, 16, 500, 1024])
async def test_prompts_have_the_length_asked_for(tokens: int) -> None:
    assert len(await token_prompt("seed", tokens, by_bytes)) == tokens
    assert len(await token_prompt("seed", tokens, by_words)) == tokens


async def test_a_tokenizer_of_few_tokens_gets_more_words() -> None:
    async def by_sentences(text: str) -> list[int]:
        return [len(sentence) for sentence in text.split(".")]

    assert len(await token_prompt("seed", 100, by_sentences)) == 100


async def test_a_tokenizer_of_no_tokens_is_refused() -> None:
    async def to_nothing(text: str) -> list[int]:
        return []

    with pytest.raises(InvalidRequestError, match="gives 0 tokens"):
        await token_prompt("seed", 4, to_nothing)


def test_texts_of_a_run_differ_within_a_few_words() -> None:
    starts = [text(f"run/{n}", 8).split()[:5] for n in range(200)]
    assert all(one != other for one, other in combinations(starts, 2))


@given(st.text(), st.integers(1, 300), st.integers(1, 300))
def test_a_longer_text_of_a_seed_begins_with_the_shorter(seed: str, one: int, other: int) -> None:
    short, long = text(seed, min(one, other)), text(seed, max(one, other))
    assert long.startswith(short)
    assert len(long.split()) >= max(one, other)


@pytest.mark.parametrize("tokens", [1, 13, 512])
def test_text_prompts_are_about_as_long(tokens: int) -> None:
    assert len(word_prompt("seed", tokens).split()) == max(1, round(tokens / 1.3))
