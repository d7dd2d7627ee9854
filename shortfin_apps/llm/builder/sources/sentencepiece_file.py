"""Read the vocabulary of a `tokenizer.model`, a SentencePiece file.

The file is a protocol buffer, sentencepiece_model.proto's ModelProto. Only the fields in `_Piece`, `_Trainer`
and `_Normalizer` are read, in protocol buffers' wire format.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gguf import TokenType

from shortfin_apps.llm.builder.sources.base import parse
from shortfin_apps.llm.builder.sources.gguf_tokenizer import GgufVocabulary
from shortfin_apps.llm.builder.sources.metadata_limits import MAX_VOCABULARY_BYTES, check_at_most
from shortfin_apps.llm.contract.errors import BuildError

# `TrainerSpec.model_type` -> llama.cpp's name of the kind of vocabulary.
_KINDS: Final = {1: "t5", 2: "llama"}  # unigram and BPE
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
_MAX_FILE_BYTES = 4 * MAX_VOCABULARY_BYTES

Value = int | bytes


@dataclass(slots=True)
class _Model:
    """The fields of a ModelProto, with the defaults of sentencepiece_model.proto."""

    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    trainer: dict[int, Value] = field(default_factory=dict)
    normalizer: dict[int, Value] = field(default_factory=dict)

    def token_id(self, number: int, default: int | None) -> int | None:
        """Return the token id in field `number` of the trainer; None for -1, which means none."""
        token_id = self.trainer.get(number, default)
        return token_id if isinstance(token_id, int) and token_id < len(self.pieces) else None


def sentencepiece_vocabulary(path: Path, added: Mapping[int, tuple[str, bool]]) -> GgufVocabulary:
    """Return the vocabulary with the tokens `added`: id -> the token, and whether it is a control token.

    Raises BuildError for a damaged file, and for one that the library `tokenizers` cannot reproduce.
    """
    model = _read(path)
    _add(str(path), model, added)
    kind = _KINDS.get(_number(model.trainer, 3, 1))
    charsmap = model.normalizer.get(2, b"")
    removes_spaces = bool(model.normalizer.get(4, 1))
    if kind is None:
        raise BuildError(f"{path}: is neither BPE nor unigram; save the model with its fast tokenizer")
    if kind == "llama" and (charsmap or removes_spaces):
        raise BuildError(f"{path}: normalises the text before BPE; save the model with its fast tokenizer")
    keys: Mapping[str, Any] = {
        "ggml.model": kind,
        "ggml.tokens": model.pieces,
        "ggml.scores": model.scores,
        "ggml.token_type": model.kinds,
        "ggml.unknown_token_id": model.token_id(40, 0),
        "ggml.bos_token_id": model.token_id(41, 1),
        "ggml.eos_token_id": model.token_id(42, 2),
        "ggml.padding_token_id": model.token_id(43, None),
        "ggml.add_space_prefix": bool(model.normalizer.get(3, 1)),
        "ggml.remove_extra_whitespaces": removes_spaces,
        "ggml.precompiled_charsmap": list(charsmap) if isinstance(charsmap, bytes) else [],
    }
    return parse(str(path), GgufVocabulary, keys)


def _read(path: Path) -> _Model:
    try:
        check_at_most(str(path), "has {} bytes", path.stat().st_size, _MAX_FILE_BYTES)
        content = path.read_bytes()
        model = _Model()
        for number, value in _fields(content):
            if number == 1 and isinstance(value, bytes):
                _add_piece(model, dict(_fields(value)))
            elif number == 2 and isinstance(value, bytes):
                model.trainer = dict(_fields(value))
            elif number == 3 and isinstance(value, bytes):
                model.normalizer = dict(_fields(value))
    except OSError as error:
        raise BuildError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, IndexError, struct.error) as error:
        raise BuildError(f"{path}: is not a SentencePiece model ({error})") from error
    if not model.pieces:
        raise BuildError(f"{path}: is not a SentencePiece model (it has no pieces)")
    return model


def _add_piece(model: _Model, piece: Mapping[int, Value]) -> None:
    text, score = piece.get(1, b""), piece.get(2, b"\0" * 4)
    if not isinstance(text, bytes) or not isinstance(score, bytes):
        raise ValueError("a piece has a field of another type")
    model.pieces.append(text.decode())
    model.scores.append(struct.unpack("<f", score)[0])
    model.kinds.append(_number(piece, 3, TokenType.NORMAL))


def _number(fields: Mapping[int, Value], number: int, default: int) -> int:
    value = fields.get(number, default)
    return value if isinstance(value, int) else default


def _add(where: str, model: _Model, added: Mapping[int, tuple[str, bool]]) -> None:
    """Add tokens at the end of the vocabulary, or in place of the pieces with their ids."""
    for token_id, (token, is_control) in sorted(added.items()):
        kind = TokenType.CONTROL if is_control else TokenType.USER_DEFINED
        if token_id > len(model.pieces):
            raise BuildError(f"{where}: has {len(model.pieces)} pieces, but `{token}` is added as {token_id}")
        if token_id == len(model.pieces):
            model.pieces.append(token)
            model.scores.append(0.0)
            model.kinds.append(kind)
        elif model.kinds[token_id] != TokenType.UNKNOWN:
            model.pieces[token_id], model.kinds[token_id] = token, kind


def _fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """Yield (field number, value) for all fields of a message; numbers of 32 and 64 bits as bytes.

    Raises ValueError or IndexError if it is damaged.
    """
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire == _BYTES:
            size, at = _varint(message, at)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire}")
        if at + size > len(message):
            raise ValueError("a field is longer than the file")
        yield number, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the integer at `at`, and the place after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("an integer of more than 64 bits")
