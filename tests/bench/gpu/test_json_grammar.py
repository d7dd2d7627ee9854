from __future__ import annotations

import random

import pytest

from bench.gpu.json_grammar import Words, json_grammar
from bench.gpu.mixed import OUTPUT_TOKENS

VOCAB = 3000


@pytest.mark.parametrize("seed", range(5))
def test_an_output_is_json_that_goes_on(seed: int) -> None:
    rng, words, matcher = random.Random(seed), Words(VOCAB), json_grammar(VOCAB).matcher()
    output: list[int] = []
    for _ in range(2 * OUTPUT_TOKENS):
        bitmask = matcher.allowed(output)
        allowed = [token_id for token_id in range(VOCAB) if bitmask[token_id // 8] >> token_id % 8 & 1]
        assert words.eos_token_id not in allowed
        output.append(rng.choice(allowed))
    assert b"".join(words.tokens[token_id] for token_id in output).startswith(b'[{"name":"')


def test_tokens_of_the_largest_vocabulary_are_distinct() -> None:
    assert len(set(Words(248_320).tokens)) == 248_320
