"""Read the vocabulary of a `tekken.json`, the tokenizer of Mistral's own format.

It is byte-level BPE as in tiktoken: a token of several bytes is the merge of any two tokens, and tokens of
lower rank are merged first. Special tokens come first in the vocabulary.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf import TokenType
from pydantic import BaseModel, Field
from tokenizers import pre_tokenizers

from shortfin_apps.llm.builder.sources.base import parse
from shortfin_apps.llm.builder.sources.gguf_tokenizer import GgufVocabulary
from shortfin_apps.llm.builder.sources.hf_files import read_json
from shortfin_apps.llm.builder.sources.metadata_limits import MAX_MERGES, MAX_TOKEN_BYTES, check_at_most
from shortfin_apps.llm.builder.sources.word_rules import WORD_RULES
from shortfin_apps.llm.contract.errors import BuildError

RULES = "tekken"  # in WORD_RULES
# Special tokens of files without a list of them, which are older than version 11.
_OLD_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


class _Config(BaseModel):
    pattern: str
    default_vocab_size: int = Field(gt=0)
    default_num_special_tokens: int = Field(ge=len(_OLD_SPECIAL), lt=1 << 20)


class _Token(BaseModel):
    token_bytes: str


class _Special(BaseModel):
    rank: int
    token_str: str
    is_control: bool = True


class _Tekken(BaseModel):
    config: _Config
    vocab: list[_Token]
    special_tokens: list[_Special] | None = None


def tekken_vocabulary(path: Path) -> GgufVocabulary:
    """Return the vocabulary. Raises BuildError for a damaged file, and for another pattern than Tekken's."""
    file = parse(str(path), _Tekken, read_json(path))
    if (file.config.pattern,) != WORD_RULES[RULES].patterns:
        raise BuildError(
            f"{path}: its pattern is not Tekken's, which is the only one supported; add a tokenizer.json"
        )
    special = _special_tokens(str(path), file)
    ranked = file.vocab[: max(0, file.config.default_vocab_size - len(special))]
    pieces = _pieces(str(path), [token.token_bytes for token in ranked])
    ids = {token: index for index, token in enumerate(special)}
    kinds = [TokenType.CONTROL if control else TokenType.USER_DEFINED for control in special.values()]
    keys: Mapping[str, Any] = {
        "ggml.model": "gpt2",
        "ggml.pre": RULES,
        "ggml.tokens": [*special, *pieces],
        "ggml.token_type": [*kinds, *(TokenType.NORMAL for _ in pieces)],
        "ggml.merges": _merges(str(path), pieces),
        "ggml.unknown_token_id": ids.get("<unk>"),
        "ggml.bos_token_id": ids.get("<s>"),
        "ggml.eos_token_id": ids.get("</s>"),
        "ggml.padding_token_id": ids.get("<pad>"),
    }
    return parse(str(path), GgufVocabulary, keys)


def _special_tokens(where: str, file: _Tekken) -> dict[str, bool]:
    """Return special token -> whether it is a control token, in order of ids, with names for unused ids."""
    count = file.config.default_num_special_tokens
    given = file.special_tokens
    if given is None:
        given = [_Special(rank=rank, token_str=token) for rank, token in enumerate(_OLD_SPECIAL)]
    by_rank = {token.rank: token for token in given}
    named = [by_rank.get(n) or _Special(rank=n, token_str=f"<SPECIAL_{n}>") for n in range(count)]
    special = {token.token_str: token.is_control for token in named}
    if len(special) != count or len(by_rank) != len(given) or not by_rank.keys() <= set(range(count)):
        raise BuildError(f"{where}: `special_tokens` are not {count} different tokens")
    return special


def _pieces(where: str, encoded: Sequence[str]) -> list[str]:
    """Return the tokens in GPT-2's alphabet, which has a printable character for each byte."""
    letters = _alphabet()
    try:
        decoded = [base64.b64decode(text, validate=True) for text in encoded]
    except (binascii.Error, ValueError) as error:
        raise BuildError(f"{where}: a token of the vocabulary is not base64 ({error})") from error
    check_at_most(where, "a token has {} bytes", max(map(len, decoded), default=0), MAX_TOKEN_BYTES)
    return ["".join(letters[byte] for byte in token) for token in decoded]


def _alphabet() -> list[str]:
    """Return the character of each byte: printable bytes are their own, others follow from U+0100 on."""
    own = {ord(letter) for letter in pre_tokenizers.ByteLevel.alphabet() if ord(letter) < 256}
    others = (byte for byte in range(256) if byte not in own)
    shifted = {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [shifted.get(byte, chr(byte)) for byte in range(256)]


def _merges(where: str, pieces: Sequence[str]) -> list[str]:
    """Return all pairs of tokens whose concatenation is a token, by the rank of the concatenation."""
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    merges: list[str] = []
    for piece in pieces:
        pairs = sorted(_pairs(piece, ranks), key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += map(" ".join, pairs)
        check_at_most(where, "the vocabulary has {} merges", len(merges), MAX_MERGES)
    return merges


def _pairs(piece: str, ranks: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the splits of a token into two tokens."""
    for cut in range(1, len(piece)):
        if piece[:cut] in ranks and piece[cut:] in ranks:
            yield piece[:cut], piece[cut:]
