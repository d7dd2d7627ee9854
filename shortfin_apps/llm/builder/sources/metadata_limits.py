"""Limits on a source's metadata, several times what published models have.

Metadata is read into Python objects, which take many times the bytes of the file. Without limits, a file of a
few megabytes could fill the memory of the machine that builds it.
"""

from __future__ import annotations

from collections.abc import Sequence

from shortfin_apps.llm.contract.errors import BuildError

MAX_JSON_BYTES = 1 << 28  # tokenizer.json and the index of weights; Gemma's tokenizer has 33 MB
MAX_KEYS = 1 << 16  # per GGUF file
MAX_ITEMS = 1 << 22  # in all arrays of a GGUF file; a vocabulary has 0.5 to 1.5 million
MAX_TEXT_BYTES = 1 << 26  # per text in a GGUF file, which may be a tokenizer.json
MAX_TENSORS = 1 << 20
MAX_EXPERTS = 1 << 18  # total over all tensors with a layer's experts; published models have 0.1 million
MAX_NAME_CHARS = 512  # per tensor
MAX_DIMENSIONS = 8
MAX_TEMPLATE_CHARS = 1 << 20  # the longest published ones have 20,000
MAX_TOKEN_BYTES = 1024  # per token, as in llguidance; vocabularies have runs of 128 to 256 characters
MAX_VOCABULARY_BYTES = 1 << 24  # all tokens together
MAX_MERGES = 1 << 22
MAX_MERGED_CHARS = 1 << 26  # merges derived from pieces; Gemma's have 3 million


def check_at_most(where: str, what: str, count: int, limit: int) -> None:
    """Raise BuildError unless `count` is at most `limit`; `what` has a `{}` for the count."""
    if count > limit:
        raise BuildError(
            f"{where}: {what.format(f'{count:,}')}, but at most {limit:,} are read; check that the file is"
            " what it should be"
        )


def check_vocabulary(where: str, tokens: Sequence[str]) -> None:
    """Raise BuildError for tokens so long, or so many, that processing them would be unbounded."""
    lengths = [len(token.encode("utf-8", "surrogatepass")) for token in tokens]
    check_at_most(where, "a token of the vocabulary has {} bytes", max(lengths, default=0), MAX_TOKEN_BYTES)
    check_at_most(where, "the vocabulary has {} bytes", sum(lengths), MAX_VOCABULARY_BYTES)


def check_charsmap(where: str, charsmap: bytes) -> None:
    """Raise BuildError for a `precompiled_charsmap` that is shorter than it claims.

    It starts with the size of a table, in 4 bytes. The library allocates this size before it reads the table,
    and aborts the process if there is no memory.
    """
    size = int.from_bytes(charsmap[:4], "little")
    if len(charsmap) < 4 or size > len(charsmap) - 4:
        raise BuildError(
            f"{where}: `precompiled_charsmap` has {len(charsmap):,} bytes, too few for its table of {size:,};"
            " download the model again"
        )
