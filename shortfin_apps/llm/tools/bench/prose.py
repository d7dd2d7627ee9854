"""Generates English-like prompts of a given number of tokens that no server has cached."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from itertools import islice

from shortfin_apps.llm.contract.errors import InvalidRequestError

Tokenize = Callable[[str], Awaitable[list[int]]]
"""Token ids of a text, without special tokens."""


def _words(text: str) -> list[str]:
    return text.split()


_NOUNS = _words("""
harbour river teacher garden winter letter engine valley market captain library mountain kitchen lantern
village orchard station painter bridge forest window doctor island castle farmer violin journey weather
stranger machine morning shadow carpenter meadow coast baker clock theatre tunnel painting answer question
""")
_VERBS = _words("""
remembers follows carries builds finds watches repairs describes leaves opens crosses measures paints
answers forgets borrows studies gathers mends guards visits questions sketches lifts turns hides
""")
_ADJECTIVES = _words("""
quiet old bright narrow distant careful heavy golden silent early broken gentle curious northern famous
empty patient wooden strange warm hollow silver crowded simple ancient pale sudden honest rough slender
""")
_LINKS = ["while", "because", "although", "before", "after", "until", "so that", "where"]
_PLACES = ["near the {}", "behind the {}", "beyond the {}", "under the {}", "inside the {}", "along the {}"]


def sentence(rng: random.Random) -> str:
    """One sentence of 10 to 20 words."""

    def noun() -> str:
        return f"{rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)}"

    place = rng.choice(_PLACES).format(noun())
    first = f"the {noun()} {rng.choice(_VERBS)} the {noun()} {place}"
    if rng.random() < 0.5:
        first += f" {rng.choice(_LINKS)} the {rng.choice(_NOUNS)} {rng.choice(_VERBS)} a {noun()}"
    return first[0].upper() + first[1:] + "."


def text(seed: str, words: int) -> str:
    """Text of at least `words` words. Texts of different seeds differ within their first few words.

    The same seed gives the same text, and a longer text begins with the shorter one.
    """
    rng = random.Random(seed)
    sentences: list[str] = [
        f"{rng.choice(_NOUNS).capitalize()} {rng.randrange(10**6)}, {rng.choice(_NOUNS)}."
    ]
    count = 3
    while count < words:
        sentences.append(sentence(rng))
        count += len(sentences[-1].split())
    return " ".join(sentences)


async def token_prompt(seed: str, tokens: int, tokenize: Tokenize) -> list[int]:
    """Exactly `tokens` token ids of a text. Raises InvalidRequestError if the tokenizer yields none."""
    words = tokens
    # A word is almost always at least one token, so the first attempt is nearly always enough.
    for _ in range(8):
        token_ids = await tokenize(text(seed, words))
        if len(token_ids) >= tokens:
            return token_ids[:tokens]
        words *= 2
    raise InvalidRequestError(
        f"the tokenizer gives {len(token_ids)} tokens for {words // 2} words of English"
    )


def word_prompt(seed: str, tokens: int) -> str:
    """Text of about `tokens` tokens, assuming 1.3 tokens per word."""
    return " ".join(islice(text(seed, tokens).split(), max(1, round(tokens / 1.3))))
