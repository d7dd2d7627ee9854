"""Limits on a source's metadata, several times the sizes in published models.

Metadata is read into Python objects, which take many times its size in the file. Without limits, a file of a
few megabytes could fill the memory of the machine that runs the build.
"""

from __future__ import annotations

from collections.abc import Sequence

from shortfin_apps.llm.contract.errors import BuildError

MAX_JSON_BYTES = 1 << 28  # tokenizer.json and the index of weights; Gemma's tokenizer has 33 MB
MAX_KEYS = 1 << 16  # per GGUF file
MAX_ITEMS = 1 << 22  # in all arrays of a GGUF file; the arrays of a vocabulary have 0.5 to 1.5 million
MAX_TEXT_BYTES = 1 << 26  # per string in a GGUF file; a string may be a whole tokenizer.json
MAX_TENSORS = 1 << 20
MAX_EXPERTS = 1 << 18  # summed over all tensors that stack experts; published models have 0.1 million
MAX_NAME_CHARS = 512  # per tensor
MAX_DIMENSIONS = 8
MAX_TEMPLATE_CHARS = 1 << 20  # the longest published ones have 20,000
MAX_TOKEN_BYTES = 1024  # per token, as in llguidance; published models have tokens of 128 to 256 characters
MAX_VOCABULARY_BYTES = 1 << 24  # of all tokens together
MAX_MERGES = 1 << 22
MAX_MERGED_CHARS = 1 << 26  # of all merges that are derived from scores; Gemma's have 3 million


def check_at_most(where: str, what: str, count: int, limit: int) -> None:
    """Raise BuildError if `count` exceeds `limit`; `what` is a message with a `{}` for the count."""
    if count > limit:
        raise BuildError(
            f"{where}: {what.format(f'{count:,}')}, but at most {limit:,} are read; check that the file is"
            " what it should be"
        )


def check_vocabulary(where: str, tokens: Sequence[str]) -> None:
    """Raise BuildError for a token that is too long, or for too many bytes of tokens in total."""
    lengths = [len(token.encode("utf-8", "surrogatepass")) for token in tokens]
    check_at_most(where, "a token of the vocabulary has {} bytes", max(lengths, default=0), MAX_TOKEN_BYTES)
    check_at_most(where, "the vocabulary has {} bytes", sum(lengths), MAX_VOCABULARY_BYTES)


def check_charsmap(where: str, charsmap: bytes) -> None:
    """Raise BuildError for a `precompiled_charsmap` that is shorter than the size in its header.

    Its first 4 bytes are the size of a table. The `tokenizers` library allocates this size before reading the
    table, and aborts the process if the allocation fails.
    """
    size = int.from_bytes(charsmap[:4], "little")
    if len(charsmap) < 4 or size > len(charsmap) - 4:
        raise BuildError(
            f"{where}: `precompiled_charsmap` has {len(charsmap):,} bytes, too few for its table of {size:,};"
            " download the model again"
        )
