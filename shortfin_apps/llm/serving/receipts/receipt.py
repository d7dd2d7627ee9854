"""A receipt, version 1: the inputs that determined an answer, and a digest of the model's results.

    {"version": 1, "artifact": "...", "tokenizer": "...", "entries": ["decode", "prefill"],
     "prompt_ids": [...], "sampling": {...}, "output_ids": [...], "finish": "length",
     "logits": "...", "marks": "...", "prompt": "...", "key": "...", "signature": "..."}

`sampling` uses the names of `/generate`, and has only values that differ from SamplingParams' defaults.
`prompt` is present if requested, `key` and `signature` if the server has a key. Bytes are base64url without
padding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from shortfin_apps.llm.components.request.messages import FinishReason
from shortfin_apps.llm.serving.receipts.chain import Chain
from shortfin_apps.llm.serving.receipts.encoding import DIGEST_BYTES, canonical_json, from_text
from shortfin_apps.llm.serving.receipts.errors import ReceiptError

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

    `entries` are the entry families of the rows that the tokens were chosen from. `logits` is the end of the
    chain, and `marks` its marks. `prompt` is the text of the prompt's tokens, `key` the public key's id.
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
        """Parses JSON objects. Raises ReceiptError for anything except a complete receipt."""
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
        """Returns the receipt as JSON objects, without absent fields."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: _listed(value) for name, value in values.items() if value is not None}

    @property
    def signed_bytes(self) -> bytes:
        """The signed content: everything except the signature."""
        return canonical_json(replace(self, signature=None).to_json())

    def new_chain(self) -> Chain:
        """Returns the chain of an answer that this receipt determines, before its first token."""
        return chain_of(self.artifact, self.tokenizer, self.prompt_ids, self.sampling)


def _listed(value: object) -> object:
    if isinstance(value, FinishReason):
        return value.value
    return list(value) if isinstance(value, tuple) else value


_RECEIPT = TypeAdapter(Receipt)


def chain_of(
    artifact: str, tokenizer: str, prompt_ids: tuple[int, ...], sampling: Mapping[str, JsonValue]
) -> Chain:
    """Returns the chain that begins with these fields of a receipt."""
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
