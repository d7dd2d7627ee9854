"""A JSON schema for a model of random weights, which has no tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product
from string import ascii_lowercase

from llguidance import LLTokenizer, TokenizerWrapper

from shortfin_apps.llm.components.grammar.compiled import compiled
from shortfin_apps.llm.components.grammar.source import schema_source
from shortfin_apps.llm.components.request.grammar import Grammar

# No output of a measurement is complete: 99 objects take more tokens.
SCHEMA = {
    "type": "array",
    "minItems": 99,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}


class Words:
    """A vocabulary of all bytes, then words of letters; the last token ends an output."""

    bos_token_id = None

    def __init__(self, vocab_size: int) -> None:
        self.eos_token_id = vocab_size - 1
        self.special_token_ids = [self.eos_token_id]
        self.tokens = [*islice(_tokens(), vocab_size - 1), b"</s>"]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _tokens() -> Iterator[bytes]:
    yield from (bytes([value]) for value in range(256))
    for length in (2, 3, 4):
        for letters in product(ascii_lowercase, repeat=length):
            yield "".join(letters).encode()


def json_grammar(vocab_size: int) -> Grammar:
    """Compile SCHEMA for a model with a vocabulary of at least 257 tokens."""
    tokenizer = LLTokenizer(TokenizerWrapper(Words(vocab_size)))
    return compiled(schema_source(SCHEMA, is_compact=True), tokenizer)
