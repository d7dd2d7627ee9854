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
MAX_SOURCE_CHARS = 1 << 17  # limit of a grammar, higher than the grammar compiler's
MAX_READ_CHARS = 1 << 19  # limit of all schemas of a grammar; reading so many takes some tenths of a second
JSON_SPACE = r"[ \n\t]{0,8}"  # bounded, because a weak model may generate white space until its token limit


class Lark:
    """A grammar under construction.

    `special_ids`: token string to token id, of the tokens that match by id only (`Tokenizer.tag_tokens`).
    """

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
        """Return an expression of exactly this text; special token strings in it become special tokens."""
        parts = self._special.split(text) if self._special_ids else [text]
        return " ".join(self._literal_part(part) for part in parts if part)

    def through(self, mark: str, text: str = ANY_TEXT) -> str:
        """Return an expression of a text up to and with its first `mark`; `text`: expression of the text."""
        if mark in self._special_ids:
            return f"{text} {self.literal(mark)}"
        return self._add(f"[suffix={json.dumps(mark)}]", text)

    def thought(self, end: str) -> str:
        """Return an expression of reasoning up to and with its `end`.

        If the end is one token, the text before it does not spell it with other tokens, because the parser
        of answers finds it in the text.
        """
        if end not in self._special_ids:
            return self.through(end)
        spelled = f"{ANY_TEXT} {json.dumps(end)} {ANY_TEXT}"
        return self.through(end, self.terminal(f"{ANY_TEXT} & ~({spelled})"))

    def text_with(self, marks: Sequence[str], rest: str) -> str:
        """Return an expression of any text in which the expression `rest` follows each of the `marks`.

        A mark cannot match as part of the text, because the text ends at its first mark.
        """
        begun = one_of([self.through(mark) for mark in marks])
        return f"({begun} {rest})* {ANY_TEXT}"

    def json(self, schema: Mapping[str, Any], *, strict: bool, owner: str = "") -> str:
        """Return an expression of the JSON values that match `schema`.

        Unless strict, unenforceable keywords are ignored. `owner`: the schema's owner in error messages.
        Raises InvalidRequestError if the grammar is too long.
        """
        self._check(_num_chars(schema))
        own = {"x-guidance": {"lenient": not strict, "whitespace_pattern": JSON_SPACE}, "x-owner": owner}
        return self.rule("%json " + json.dumps({**schema, **own}))

    def read_schema(self, schema: Mapping[str, Any]) -> None:
        """Count the characters of a complete schema; see `read`."""
        self.read(_num_chars(schema))

    def read(self, num_chars: int) -> None:
        """Count the characters of schemas read so far. Raises InvalidRequestError above MAX_READ_CHARS."""
        self._unread_chars -= num_chars
        if self._unread_chars < 0:
            raise InvalidRequestError(
                f"the schemas have more than {MAX_READ_CHARS:,} characters, each part counted as often as it"
                " is referred to: give fewer or smaller ones",
                "tools",
            )

    def rule(self, expression: str) -> str:
        """Add a rule for an expression; return the rule's name."""
        return self._add("", expression)

    def terminal(self, expression: str) -> str:
        """Add a terminal for an expression, which may contain `&` and `~`; return the terminal's name."""
        return self._add_rule(f"TEXT_{len(self._rules)}", "", expression)

    def source(self, start: str) -> str:
        """Return the grammar's source, with `start` as its start expression."""
        return "\n".join([f"start: {start}", *self._rules])

    def _literal_part(self, part: str) -> str:
        token_id = self._special_ids.get(part)
        return json.dumps(part, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"

    def _add(self, attributes: str, expression: str) -> str:
        return self._add_rule(f"rule_{len(self._rules)}", attributes, expression)

    def _add_rule(self, name: str, attributes: str, expression: str) -> str:
        """Add a rule or terminal; return its name. Raises InvalidRequestError if the grammar is too long."""
        self._check(len(expression))
        self._chars_left -= len(expression)
        self._rules.append(f"{name}{attributes}: {expression}")
        return name

    def _check(self, num_chars: int) -> None:
        if num_chars > self._chars_left:
            raise too_long()


def _num_chars(schema: Mapping[str, Any]) -> int:
    """Return the length of the schema as JSON."""
    try:
        return len(orjson.dumps(schema))  # at least 10 times faster than `json`
    except orjson.JSONEncodeError:  # orjson refuses long integers and deep nesting
        return len(json.dumps(schema))


def too_long() -> InvalidRequestError:
    return InvalidRequestError(
        f"the grammar has more than {MAX_SOURCE_CHARS:,} characters: give it fewer or smaller schemas",
        "tools",
    )


def one_of(expressions: Sequence[str]) -> str:
    return "(" + " | ".join(expressions) + ")"


def repeated(item: str, separator: str, most: int) -> str:
    """Return an expression of one to `most` items. `separator`: an expression, or "" for none."""
    return item if most == 1 else f"{item} ({separator} {item}){{0,{most - 1}}}"
