from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.tools.bench.workload import (
    PRESETS,
    chosen_presets,
    custom_workloads,
    text,
    token_prompt,
    word_prompt,
)


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


def test_presets_are_unchanged() -> None:
    shapes = {
        w.name: (w.concurrency, len(w.prompt_tokens), sum(w.prompt_tokens), w.output_tokens)
        for w in PRESETS.values()
    }
    assert shapes == {
        "W1": (1, 3, 384, 128),
        "W2": (8, 8, 1024, 128),
        "W3": (32, 32, 264 * 32, 64),
        "W4": (16, 16, 32 * 16, 32),
        "W5": (1, 1, 1024, 1),
    }
    assert PRESETS["W4"].shared_prefix_tokens == 512


def test_a_shared_prefix_is_measured_cold_then_warm() -> None:
    assert PRESETS["W4"].passes == ("W4c", "W4w")
    assert PRESETS["W1"].passes == ("W1",)


def test_presets_are_chosen_by_name() -> None:
    assert [w.name for w in chosen_presets("w3, W1,W3")] == ["W3", "W1"]
    assert [w.name for w in chosen_presets("all")] == ["W1", "W2", "W3", "W4", "W5"]
    with pytest.raises(InvalidRequestError, match="no preset 'W9'"):
        chosen_presets("W1,W9")


def test_a_custom_run_has_a_workload_per_concurrency() -> None:
    one, four = custom_workloads(100, 10, [1, 4], None)
    assert (one.name, one.prompt_tokens, one.concurrency) == ("C1", (100, 100), 1)
    assert (four.name, len(four.prompt_tokens), four.output_tokens) == ("C4", 8, 10)
    (exact,) = custom_workloads(100, 10, [4], 5, shared_prefix_tokens=64)
    assert len(exact.prompt_tokens) == 5
    assert exact.passes == ("C4c", "C4w")
