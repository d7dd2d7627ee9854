"""Finds the end of JSON as models write it, and converts it to valid JSON if it is not."""

from __future__ import annotations

import json
import re
from enum import Enum, auto

WHITE_SPACE = " \n\r\t"
MAX_DEPTH = 100  # of nested arrays and objects; parsers of clients refuse more than about 200
QUOTES = "\"'"
_CLOSERS = {"{": "}", "[": "]"}
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_WORD = re.compile(r"[\w.+$-][\w.+$ -]*")
_MORE_OF_WORD = re.compile(r"[\w.+$ -]+")
_PLAIN = re.compile(r"[^\"'\\\x00-\x1f]+")
_SURROGATE = re.compile(r"\\u[dD](?:(?P<high>[89abAB])|[c-fC-F])[0-9a-fA-F]{2}")
REPLACEMENT = "\\ufffd"  # replaces half of a surrogate pair, which many parsers refuse
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")


class JsonValue:
    """Finds the end of a JSON value by brackets and quotes only; the value may be invalid otherwise."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    @property
    def is_open(self) -> bool:
        """True if the text so far lacks closing brackets or a quote."""
        return self._in_string or self._depth > 0

    def end_in(self, text: str, start: int) -> int | None:
        """Return the index in `text` where the value ends; None if it continues after `text`.

        `start`: where the value begins or continues. Callers must pass each character once, in order.
        """
        for place in range(start, len(text)):
            char = text[place]
            if self._in_string:
                if self._ends_string(char) and self._depth == 0:
                    return place + 1
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1 + self._depth  # excludes the bracket that ends the container of a scalar
            elif self._depth == 0 and (char == "," or char in WHITE_SPACE):
                return place
        return None

    def _ends_string(self, char: str) -> bool:
        is_escaped, self._is_escaped = self._is_escaped, char == "\\" and not self._is_escaped
        self._in_string = is_escaped or char != '"'
        return not self._in_string


class Next(Enum):
    """The element that must come next, unless white space or the end of the array or object does."""

    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA = auto()


class MendedJson:
    """Converts an array or object to valid JSON as it arrives. Input starts after the opening bracket.

    Valid JSON is copied, white space included. Repairs: raw control characters and wrong escapes in strings
    are escaped; lone surrogates become U+FFFD; single quotes, Python's constants and bare words become JSON;
    missing commas, colons and brackets are added; extra commas, and keys without values, are dropped.
    At text that cannot be repaired, the output ends with all open brackets closed.
    """

    def __init__(self, bracket: str, space: str = "") -> None:
        """`bracket`: the opening bracket; `space`: white space after it. Both have been read."""
        self._open = [_CLOSERS[bracket]]  # closing brackets that are still missing
        self._next = Next.KEY if bracket == "{" else Next.VALUE
        self._out = [bracket]
        self._held = [space]  # white space, a comma, a key, a colon: written only if a value follows
        self._num_before_key = 0  # elements of `_held` before the key
        self._quote = ""  # the quote that began the current string; "" outside of strings
        self._escape = ""  # an incomplete escape in a string
        self._high = ""  # first half of a surrogate pair, written together with the second half
        self._word: list[str] = []
        self._at_line_end = False

    def read(self, text: str, start: int) -> tuple[str, int | None]:
        """Convert `text` from `start` on; return the new output, and where reading stopped.

        Reading stops at the end of the JSON, at unrepairable text, or at a line end in a string (see
        `at_line_end`). The second value is None if all of `text` was read and the JSON continues.
        """
        place = start
        while place < len(text):
            if self._stops_before(text[place]):
                return self._written(), place
            if (end := self._step(text, place)) is None:
                return self._written() + self.close(), place
            if not self._open:
                return self._written(), end
            place = end
        return self._written(), None

    @property
    def at_line_end(self) -> bool:
        return self._at_line_end

    def close(self) -> str:
        if self._quote:
            self._end_string()
        self._end_word()
        self._held.clear()
        self._out += reversed(self._open)
        self._open.clear()
        return self._written()

    def _stops_before(self, char: str) -> bool:
        """Return True once per raw line end in a string, where the string's closing quote may be missing."""
        self._at_line_end = bool(self._quote) and char == "\n" and not self._at_line_end
        return self._at_line_end

    def _step(self, text: str, place: int) -> int | None:
        """Read one element at `place`; return the position after it, or None for unrepairable text."""
        if self._quote:
            return self._in_escape(text, place) if self._escape else self._in_string(text, place)
        if (word := (_MORE_OF_WORD if self._word else _WORD).match(text, place)) is not None:
            if not self._word and not self._begins(Next.VALUE):
                return None
            self._word.append(word[0])
            return word.end()
        self._end_word()
        return place + 1 if self._takes(text[place]) else None

    def _takes(self, char: str) -> bool:
        if char in WHITE_SPACE:
            self._held.append(char)
        elif char in QUOTES:
            return self._begin_string(char)
        elif char in _CLOSERS:
            return self._begin_inner(char)
        elif char in self._open:
            self._end_inner(char)
        elif char == ",":
            self._comma()
        elif char == ":":
            return self._colon()
        else:
            return False
        return True

    def _begins(self, kind: Next) -> bool:
        """Add a missing comma or colon before a key or value; return False if none may begin here.

        `kind`: VALUE for a value that cannot be a key; KEY for a string, which may be either.
        """
        in_object = self._open[-1] == "}"
        if self._next is Next.COMMA:
            if in_object and kind is Next.VALUE:
                return False
            self._held.append(",")
            self._next = Next.KEY if in_object else Next.VALUE
        elif self._next is Next.COLON:
            self._held.append(":")
            self._next = Next.VALUE
        if self._next is Next.KEY:
            self._num_before_key = len(self._held)
        else:
            self._out += self._held
            self._held.clear()
        return True

    def _begin_string(self, quote: str) -> bool:
        is_begun = self._begins(Next.KEY)
        self._quote = quote
        self._write('"')
        return is_begun

    def _begin_inner(self, bracket: str) -> bool:
        if self._next is Next.KEY or len(self._open) >= MAX_DEPTH or not self._begins(Next.VALUE):
            return False
        self._write(bracket)
        self._open.append(_CLOSERS[bracket])
        self._next = Next.KEY if bracket == "{" else Next.VALUE
        return True

    def _end_inner(self, bracket: str) -> None:
        self._drop_held()
        while (innermost := self._open.pop()) != bracket:
            self._out.append(innermost)
        self._out.append(bracket)
        self._next = Next.COMMA

    def _comma(self) -> None:
        in_object = self._open[-1] == "}"
        if self._next is Next.COMMA:
            self._held.append(",")
            self._next = Next.KEY if in_object else Next.VALUE
        elif in_object and self._next is not Next.KEY:
            del self._held[self._num_before_key :]
            self._next = Next.KEY

    def _colon(self) -> bool:
        if self._next is Next.COLON:
            self._held.append(":")
            self._next = Next.VALUE
        return self._next is Next.VALUE and self._open[-1] == "}"

    def _end_word(self) -> None:
        if not self._word:
            return
        word = "".join(self._word)
        text = word.rstrip(" ")
        self._word.clear()
        literal = None if self._next is Next.KEY else scalar(text)
        self._write(json.dumps(text, ensure_ascii=False) if literal is None else literal)
        self._next = Next.COLON if self._next is Next.KEY else Next.COMMA
        self._held.append(word[len(text) :])

    def _in_string(self, text: str, place: int) -> int:
        if (plain := _PLAIN.match(text, place)) is not None:
            self._write(plain[0])
            return plain.end()
        match text[place]:
            case self._quote:
                self._end_string()
            case "\\":
                self._escape = "\\"
            case "'":
                self._write("'")
            case char:
                self._write(json.dumps(char)[1:-1])
        return place + 1

    def _in_escape(self, text: str, place: int) -> int:
        char, begun = text[place], self._escape
        if (char == "u" and begun == "\\") or (char in _HEX_DIGITS and len(begun) > 1):
            self._escape += char
            is_whole, is_read = len(self._escape) == len("\\u0000"), True
        else:
            is_whole = is_read = begun == "\\" and char in "\"\\/bfnrt'"
            self._escape = (begun if is_whole else "\\" + begun) + (char if is_read else "")
            is_whole = True
        if is_whole:
            self._end_escape(self._escape)
            self._escape = ""
        return place + is_read

    def _end_escape(self, escape: str) -> None:
        if (half := _SURROGATE.fullmatch(escape)) is None:
            self._write("'" if escape == "\\'" else escape)
        elif half["high"]:
            self._write("")
            self._high = escape
        else:
            pair, self._high = self._high + escape, ""
            self._write(pair if len(pair) > len(escape) else REPLACEMENT)

    def _end_string(self) -> None:
        self._write('"')
        self._quote = self._escape = ""
        self._next = Next.COLON if self._next is Next.KEY else Next.COMMA

    def _write(self, text: str) -> None:
        if self._high:
            text, self._high = REPLACEMENT + text, ""
        (self._held if self._next is Next.KEY else self._out).append(text)

    def _drop_held(self) -> None:
        """Write the held text if it is only white space, otherwise drop it, because no value follows."""
        held = "".join(self._held)
        self._out += [held] if not held.strip(WHITE_SPACE) else []
        self._held.clear()

    def _written(self) -> str:
        text = "".join(self._out)
        self._out.clear()
        return text


def scalar(text: str) -> str | None:
    """Return a JSON value unchanged and a Python constant as JSON; None for other text."""
    text = _PYTHON.get(text, text)
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return text


def _refuse(constant: str) -> None:
    """Raise ValueError for NaN and infinities, which Python's parser accepts but JSON does not have."""
    raise ValueError(f"{constant} is not JSON")


def mended(text: str) -> str | None:
    """Return a complete array or object as valid JSON; None for other text."""
    bracket = text[:1]
    if bracket not in _CLOSERS:
        return None
    form, written = MendedJson(bracket), []
    part, end = form.read(text, 1)
    while form.at_line_end and end is not None:
        written.append(part)
        part, end = form.read(text, end)
    return "".join([*written, part]) if end == len(text) else None


def begins_member(char: str) -> bool:
    """Return True if `char` may begin an object's member, or is the object's end."""
    return char in (*QUOTES, "}") or _WORD.match(char) is not None
