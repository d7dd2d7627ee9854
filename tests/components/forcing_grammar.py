"""Grammars over the tokens of the fake device that force some of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tokenizers
from llguidance import LLTokenizer
from tokenizers import decoders, models, pre_tokenizers

from shortfin_apps.llm.components.grammar.compiled import CompiledGrammar, compiled
from shortfin_apps.llm.components.grammar.source import GrammarKind, GrammarSource
from shortfin_apps.llm.components.grammar.thought_budget import ThoughtBudget
from tests.components.fake_device import VOCAB


def thought_of(max_tokens: int, *, begins: tuple[str, ...] = (), eos: int) -> CompiledGrammar:
    """Any tokens, of which a thought has at most `max_tokens`; three tokens end it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCAB]
    backend = tokenizers.Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    budget = ThoughtBudget(max_tokens, begins, ("".join(alphabet[2:5]),))
    source = GrammarSource(GrammarKind.LARK, "start: <[*]>*", budget=budget)
    return compiled(source, LLTokenizer(backend.to_str(), eos_token=eos))


class Keys:
    """A grammar: any token t, then t % 7 tokens that it forces, then any token, and so on."""

    param = "grammar"

    def matcher(self) -> Keys:
        return self

    def allowed(self, generated: Sequence[int], ahead: Sequence[int] = ()) -> bytes:
        key = self._key([*generated, *ahead])
        allowed = [not key or i == key[0] for i in range(VOCAB)]
        return np.packbits(allowed, bitorder="little").tobytes()

    def forced(self, generated: Sequence[int]) -> Sequence[int]:
        return self._key(generated)

    def _key(self, generated: Sequence[int]) -> list[int]:
        """What is left of the tokens that the last free one forces."""
        start = 0
        while start < len(generated):
            free = generated[start]
            key = [(3 * free + i) % VOCAB for i in range(free % 7)]
            if start + len(key) >= len(generated):
                return key[len(generated) - start - 1 :]
            start += 1 + len(key)
        return []
