"""Workloads: the presets W1 to W5 and custom ones, and the text of their prompts."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from shortfin_apps.llm.contract.errors import InvalidRequestError

Tokenize = Callable[[str], Awaitable[list[int]]]
"""Returns the token ids of a text, without special tokens."""


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
    """Return a random sentence of 10 to 20 words."""

    def noun() -> str:
        return f"{rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)}"

    place = rng.choice(_PLACES).format(noun())
    first = f"the {noun()} {rng.choice(_VERBS)} the {noun()} {place}"
    if rng.random() < 0.5:
        first += f" {rng.choice(_LINKS)} the {rng.choice(_NOUNS)} {rng.choice(_VERBS)} a {noun()}"
    return first[0].upper() + first[1:] + "."


def text(seed: str, words: int) -> str:
    """Return a text of at least `words` words. Texts of different seeds differ within the first three words.

    The text depends only on `seed` and `words`. For one seed, a shorter text is a prefix of a longer one.
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
    """Return exactly `tokens` token ids. Raises InvalidRequestError if the tokenizer yields too few."""
    words = tokens
    # A word is nearly always at least one token, so the first attempt almost always yields enough.
    for _ in range(8):
        token_ids = await tokenize(text(seed, words))
        if len(token_ids) >= tokens:
            return token_ids[:tokens]
        words *= 2
    raise InvalidRequestError(
        f"the tokenizer gives {len(token_ids)} tokens for {words // 2} words of English"
    )


def word_prompt(seed: str, tokens: int) -> str:
    """Return a text of about `tokens` tokens, assuming 1.3 tokens per word."""
    return " ".join(islice(text(seed, tokens).split(), max(1, round(tokens / 1.3))))


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests sent by `concurrency` clients. Each client waits for an answer before its next request.

    `prompt_tokens` has one length per request, without the shared prefix. With `shared_prefix_tokens`, all
    prompts start with the same tokens, and the workload runs as two passes: cold (name ending in `c`), with
    an uncached prefix, then warm (`w`), with the cached prefix and new tokens after it.
    """

    name: str
    about: str
    prompt_tokens: tuple[int, ...]
    output_tokens: int
    concurrency: int
    shared_prefix_tokens: int = 0

    @property
    def passes(self) -> tuple[str, ...]:
        """The names of the passes, in the order in which they run."""
        if self.shared_prefix_tokens:
            return (f"{self.name}c", f"{self.name}w")
        return (self.name,)


PRESETS = {
    workload.name: workload
    for workload in (
        Workload("W1", "one client, 3 requests one after another, 128 in, 128 out", (128,) * 3, 128, 1),
        Workload("W2", "8 clients at once, 128 in, 128 out", (128,) * 8, 128, 8),
        Workload("W3", "32 clients at once, 16, 32, ... 512 in, 64 out", tuple(range(16, 513, 16)), 64, 32),
        Workload(
            "W4",
            "16 clients at once, 512 shared + 32 own in, 32 out; cold (W4c), then warm (W4w)",
            *((32,) * 16, 32, 16, 512),
        ),
        Workload("W5", "one request, 1,024 in, 1 out", (1024,), 1, 1),
    )
}


def chosen_presets(names: str) -> list[Workload]:
    """Return presets from a list with commas, or `all`. Raises InvalidRequestError for an unknown name."""
    if names.strip().lower() == "all":
        return list(PRESETS.values())
    chosen = [name.strip().upper() for name in names.split(",")]
    for name in chosen:
        if name not in PRESETS:
            raise InvalidRequestError(
                f"there is no preset {name!r}; choose from {', '.join(PRESETS)} or all", "preset"
            )
    return [PRESETS[name] for name in dict.fromkeys(chosen)]


def custom_workloads(
    prompt_tokens: int,
    output_tokens: int,
    concurrencies: Sequence[int],
    requests: int | None,
    shared_prefix_tokens: int = 0,
) -> list[Workload]:
    """Return a workload per concurrency. Without `requests`, each client sends two requests."""
    return [
        Workload(
            name=f"C{concurrency}",
            about=f"{concurrency} clients, {prompt_tokens} in, {output_tokens} out",
            prompt_tokens=(prompt_tokens,) * (requests or 2 * concurrency),
            output_tokens=output_tokens,
            concurrency=concurrency,
            shared_prefix_tokens=shared_prefix_tokens,
        )
        for concurrency in concurrencies
    ]
