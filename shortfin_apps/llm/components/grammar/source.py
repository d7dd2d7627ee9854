"""The grammar that a request's output must match, as given by the request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class GrammarKind(StrEnum):
    """Languages of a grammar source. REGEX has the syntax of Rust's `regex`; EBNF is GBNF or Lark."""

    JSON_SCHEMA = "JSON schema"
    REGEX = "regular expression"
    EBNF = "grammar"
    LARK = "Lark grammar"


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar before compilation. `is_compact` means JSON without white space between its parts."""

    kind: GrammarKind
    text: str
    is_compact: bool = False

    def to_json(self) -> bytes:
        return json.dumps([self.kind, self.text, self.is_compact]).encode()

    @classmethod
    def from_json(cls, encoded: bytes) -> GrammarSource:
        kind, text, is_compact = json.loads(encoded)
        return cls(GrammarKind(kind), text, is_compact)


def schema_source(schema: dict[str, Any] | str, *, is_compact: bool = False) -> GrammarSource:
    """Returns a source for the JSON values that fit a schema, which may be a text."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return GrammarSource(GrammarKind.JSON_SCHEMA, text, is_compact)


def choice_source(choices: Sequence[str]) -> GrammarSource:
    """Returns a source for one of the texts; Lark's literals use JSON's escapes."""
    alternatives = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return GrammarSource(GrammarKind.LARK, f"start: {alternatives}")


ANY_OBJECT = schema_source({"type": "object"})
