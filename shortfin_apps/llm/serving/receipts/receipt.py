"""A receipt, version 1: the inputs that determined an answer, and a digest of the model's results.

    {"version": 1, "artifact": "...", "tokenizer": "...", "entries": ["decode", "prefill"],
     "prompt_ids": [...], "sampling": {...}, "output_ids": [...], "finish": "length",
     "logits": "...", "marks": "...", "prompt": "...", "key": "...", "signature": "..."}

`sampling` uses the names of `/generate`, and has only values that differ from SamplingParams' defaults.
`prompt` is present if requested, `key` and `signature` if the server has a key. Bytes are base64url without
padding.

`logits` is the end of a chain over tokens and logits, in which each link includes the previous one:

    h_0 = H(canonical JSON of what determines the answer)
    h_i = H(h_{i-1}, token id i as int32, its logit as float32), both little-endian

H is blake2b with a 16-byte digest. Two chains with equal ends therefore have the same tokens with
bit-identical logits. `marks`, the first byte of each link, show where two chains diverge.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from shortfin_apps.llm.components.request.messages import FinishReason
from shortfin_apps.llm.contract.errors import LlmError


class ReceiptError(LlmError):
    """A receipt that cannot be read or verified, or a key that cannot be used."""


DIGEST_BYTES = 16
LARGEST_EXACT = 2**53  # integers up to this are exact in every JSON reader


def canonical_json(value: object) -> bytes:
    """Return ASCII JSON with sorted keys, no white space, and 1.0 as 1. Raises ValueError for NaN and inf."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(*parts: bytes) -> bytes:
    """Return the 16-byte blake2b digest of the joined `parts`."""
    return blake2b(b"".join(parts), digest_size=DIGEST_BYTES).digest()


def to_text(data: bytes) -> str:
    """Return `data` as base64url (RFC 4648) without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def from_text(text: str) -> bytes:
    """Decode the output of `to_text`. Raises ValueError for anything else."""
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise ValueError(f"{text[:40]!r} is not base64url") from error
    if to_text(data) != text:
        raise ValueError(f"{text[:40]!r} is not base64url as it is written here")
    return data


def _plain(value: object) -> object:
    """Convert whole floats to integers: a JSON tool in between may write 1.0 as 1."""
    if (
        isinstance(value, float)
        and math.isfinite(value)
        and value == int(value)
        and abs(value) < LARGEST_EXACT
    ):
        return int(value)
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(inner) for inner in value]
    return value


_LINK = struct.Struct("<if")


class Chain:
    """The chain of an answer's logits. `start`: JSON value of the first link; `end`: the last link."""

    def __init__(self, start: object) -> None:
        self.end = digest(canonical_json(start))
        self._marks = bytearray()

    def add(self, token_id: int, logit: float) -> None:
        """Add the answer's next token; `logit` is an f32."""
        self.end = digest(self.end, _LINK.pack(token_id, logit))
        self._marks.append(self.end[0])

    @property
    def marks(self) -> bytes:
        """The first byte of each token's link."""
        return bytes(self._marks)


VERSION = 1
KEY_ID_BYTES, SIGNATURE_BYTES = 8, 64

# Not `Literal[1]`, which accepts `true` as 1.
Version = Annotated[int, Field(ge=VERSION, le=VERSION)]
TokenIds = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**31)], ...], Field(fail_fast=True)]


def _of_bytes(count: int | None) -> AfterValidator:
    def check(text: str) -> str:
        if (found := len(from_text(text))) != count and count is not None:
            raise ValueError(f"it has {found} bytes, not {count}")
        return text

    return AfterValidator(check)


Digest = Annotated[str, _of_bytes(DIGEST_BYTES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """A receipt of an answer.

    `entries`: entry families (e.g. prefill, decode) that computed the tokens' logits. `logits`: end of the
    chain; `marks`: first byte of each link. `prompt`: the prompt's text; `key`: id of the public key.
    """

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    version: Version = VERSION
    artifact: Digest
    tokenizer: Digest
    prompt_ids: TokenIds
    output_ids: TokenIds
    sampling: dict[str, JsonValue]
    finish: FinishReason
    entries: tuple[str, ...]
    logits: Digest
    marks: Annotated[str, _of_bytes(None)]
    prompt: str | None = None
    key: Annotated[str, _of_bytes(KEY_ID_BYTES)] | None = None
    signature: Annotated[str, _of_bytes(SIGNATURE_BYTES)] | None = None

    @classmethod
    def parse(cls, value: object) -> Receipt:
        """Parse JSON objects. Raises ReceiptError for anything except a complete receipt."""
        version = value.get("version") if isinstance(value, Mapping) else None
        if isinstance(version, int) and version > VERSION:
            raise ReceiptError(
                f"the receipt has version {version}, which is newer than {VERSION}; upgrade this"
            )
        try:
            receipt = _RECEIPT.validate_json(json.dumps(value, allow_nan=False))
        except (ValidationError, ValueError, TypeError, RecursionError) as error:
            raise ReceiptError(f"this is no receipt: {_reason(error)}") from None
        if len(from_text(receipt.marks)) != len(receipt.output_ids):
            raise ReceiptError("this is no receipt: `marks` must have a byte for each of `output_ids`")
        if receipt.finish is FinishReason.ERROR:
            raise ReceiptError("this is no receipt: an answer that failed has none")
        if (receipt.key is None) != (receipt.signature is None):
            raise ReceiptError("this is no receipt: `key` and `signature` belong together")
        return receipt

    def to_json(self) -> dict[str, Any]:
        """Return the receipt as JSON objects, without absent fields."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: _listed(value) for name, value in values.items() if value is not None}

    @property
    def signed_bytes(self) -> bytes:
        """The signed content: everything except the signature."""
        return canonical_json(replace(self, signature=None).to_json())

    def new_chain(self) -> Chain:
        """Return the chain of this receipt's answer as it is before the first token."""
        return chain_of(self.artifact, self.tokenizer, self.prompt_ids, self.sampling)


def _listed(value: object) -> object:
    if isinstance(value, FinishReason):
        return value.value
    return list(value) if isinstance(value, tuple) else value


_RECEIPT = TypeAdapter(Receipt)


def chain_of(
    artifact: str, tokenizer: str, prompt_ids: tuple[int, ...], sampling: Mapping[str, JsonValue]
) -> Chain:
    """Return the chain that begins with these fields of a receipt."""
    return Chain(
        {
            "version": VERSION,
            "artifact": artifact,
            "tokenizer": tokenizer,
            "prompt_ids": prompt_ids,
            "sampling": sampling,
        }
    )


def _reason(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return "it is not JSON"
    problem = error.errors(include_url=False)[0]
    name = ".".join(map(str, problem["loc"]))
    return f"`{name}`: {problem['msg']}" if name else problem["msg"]
