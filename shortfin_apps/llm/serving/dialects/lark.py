"""Builds grammars in the llguidance library's Lark language."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from shortfin_apps.llm.contract.errors import InvalidRequestError

ANY_TEXT = r"/(.|\n)*/"
SPACE = r"/[ \n]{0,4}/"
MAX_SOURCE_CHARS = 1 << 17  # more than the grammar compiler accepts; building stops there
MAX_READ_CHARS = 1 << 19  # of schemas; reading that many takes some tenths of a second
JSON_SPACE = r"[ \n\t]{0,8}"  # bounded, because a weak model may generate it until its tokens are used up


class Lark:
    """A grammar under construction. `special_ids` maps special tokens' names to ids, which it needs."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        longest_first = sorted(special_ids, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self._rules: list[str] = []
        self._chars_left = MAX_SOURCE_CHARS
        self._unread_chars = MAX_READ_CHARS

    def is_special(self, name: str) -> bool:
        return name in self._special_ids

    def literal(self, text: str) -> str:
        """Returns an expression of exactly this text; names of special tokens in it become these tokens."""
        parts = self._special.split(text) if self._special_ids else [text]
        return " ".join(self._literal_part(part) for part in parts if part)

    def through(self, mark: str, text: str = ANY_TEXT) -> str:
        """Returns an expression of any `text` that ends with the first `mark`."""
        if mark in self._special_ids:
            return f"{text} {self.literal(mark)}"
        return self._add(f"[suffix={json.dumps(mark)}]", text)

    def text_with(self, marks: Sequence[str], rest: str) -> str:
        """Returns an expression of any text in which `rest` follows each of the `marks`.

        A mark ends the text before it immediately, so that it cannot be parsed as text.
        """
        begun = one_of([self.through(mark) for mark in marks])
        return f"({begun} {rest})* {ANY_TEXT}"

    def json(self, schema: Mapping[str, Any], *, strict: bool, owner: str = "") -> str:
        """Returns an expression of the values that fit `schema`.

        Unless strict, unenforceable keywords are ignored. Errors name the schema's `owner`.
        """
        self._check(_num_chars(schema))
        own = {"x-guidance": {"lenient": not strict, "whitespace_pattern": JSON_SPACE}, "x-owner": owner}
        return self.rule("%json " + json.dumps({**schema, **own}))

    def read_schema(self, schema: Mapping[str, Any]) -> None:
        """Like `read`, for a complete schema."""
        self.read(_num_chars(schema))

    def read(self, num_chars: int) -> None:
        """Counts the characters read of schemas. Raises InvalidRequestError if the total is too large."""
        self._unread_chars -= num_chars
        if self._unread_chars < 0:
            raise InvalidRequestError(
                f"the schemas have more than {MAX_READ_CHARS:,} characters, each part counted as often as it"
                " is referred to: give fewer or smaller ones",
                "tools",
            )

    def rule(self, expression: str) -> str:
        """Adds a rule for an expression and returns its name."""
        return self._add("", expression)

    def terminal(self, expression: str) -> str:
        """Adds a terminal, in which `&` and `~` may be used, and returns its name."""
        return self._add_rule(f"TEXT_{len(self._rules)}", "", expression)

    def source(self, start: str) -> str:
        """Returns the grammar, starting with the expression `start`."""
        return "\n".join([f"start: {start}", *self._rules])

    def _literal_part(self, part: str) -> str:
        token_id = self._special_ids.get(part)
        return json.dumps(part, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"

    def _add(self, attributes: str, expression: str) -> str:
        return self._add_rule(f"rule_{len(self._rules)}", attributes, expression)

    def _add_rule(self, name: str, attributes: str, expression: str) -> str:
        """Raises InvalidRequestError as soon as the grammar is too long."""
        self._check(len(expression))
        self._chars_left -= len(expression)
        self._rules.append(f"{name}{attributes}: {expression}")
        return name

    def _check(self, num_chars: int) -> None:
        if num_chars > self._chars_left:
            raise too_long()


def _num_chars(schema: Mapping[str, Any]) -> int:
    """Length of the schema's JSON."""
    try:
        return len(orjson.dumps(schema))  # in a tenth of the time of `json`, or less
    except orjson.JSONEncodeError:  # for long integers and deep nesting, as texts of schemas may have
        return len(json.dumps(schema))


def too_long() -> InvalidRequestError:
    return InvalidRequestError(
        f"the grammar has more than {MAX_SOURCE_CHARS:,} characters: give it fewer or smaller schemas",
        "tools",
    )


def one_of(expressions: Sequence[str]) -> str:
    return "(" + " | ".join(expressions) + ")"


def repeated(item: str, separator: str, most: int) -> str:
    """Returns an expression of one to `most` items, separated by an expression or ""."""
    return item if most == 1 else f"{item} ({separator} {item}){{0,{most - 1}}}"
