"""The text of an answer as it arrives, for incremental parsers.

A parser is a generator. It yields pieces of the answer, and None when it needs more text to decide what comes
next. The readers below decide by the text alone, never by chunk boundaries, so the joined pieces of an answer
do not depend on how the answer was streamed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from shortfin_apps.llm.serving.dialects.mended_json import WHITE_SPACE, JsonValue, MendedJson


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of a tool call of the function `name`."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next part of the JSON string with the arguments of the last started call."""

    text: str


Text = Content | Reasoning | Arguments
Piece = Text | CallStart
Parse = Generator[Piece | None, None, None]  # yields None while it needs more text or the answer's end
CallParse = Generator[Piece | None, None, bool]  # a Parse that returns True if there was a call


TextT = TypeVar("TextT", bound=Text)
T = TypeVar("T")
Wait = Generator[None, None, T]  # yields None while it needs more text; returns a T

_SPACE = re.compile(f"[{WHITE_SPACE}]*")


class Feed:
    """A buffer of text that has arrived but is not read. The writer calls `push` and `end`.

    Each character is examined a bounded number of times, however the text is split: readers immediately take
    text that cannot begin a mark, so a waiting reader leaves at most an incomplete mark in the buffer.
    """

    def __init__(self) -> None:
        self._text = ""
        self._place = 0  # index of the first unread character
        self._ended = False
        self._is_cut = False
        self._record: list[str] | None = None

    @property
    def is_cut(self) -> bool:
        """True if the answer was truncated: it ended before the model ended it."""
        return self._is_cut

    def push(self, text: str) -> None:
        self._text, self._place = self._text[self._place :] + text, 0

    def end(self, *, is_cut: bool = False) -> None:
        self._ended, self._is_cut = True, is_cut

    def unread(self, text: str) -> None:
        """Put back `text`, which must be the text that was read last."""
        if self._record is not None:
            last = self._record.pop()
            assert last == text
        self._place -= len(text)
        assert self._text.startswith(text, self._place)

    def copy(self, kind: Callable[[str], TextT], *marks: str) -> Generator[TextT | None, None, str | None]:
        """Yield the text before the first of `marks` as it arrives; read and return that mark.

        Returns None if the answer ends without a mark. Of marks that begin or end together, the longest is
        found. No mark may occur in the middle of another mark.
        """
        finder = _marks(marks)
        while True:
            found = finder.find(self._text, self._place)
            undecided = 0 if found is not None else finder.undecided(self._text, self._place)
            end = len(self._text) - undecided if found is None else found.start()
            if end > self._place:
                yield kind(self._take_to(end))
            if found is not None:
                return self._take_to(found.end())
            if self._ended:
                if self.num_unread:
                    yield kind(self._take_to(len(self._text)))
                return None
            yield None

    def text_before(self, *marks: str) -> Generator[None, None, tuple[str, str | None]]:
        """Read and return the text before the first of `marks`, and that mark or None; see `copy`."""
        pieces: list[str] = []
        copying = self.copy(Content, *marks)
        while True:
            try:
                piece = next(copying)
            except StopIteration as stop:
                return "".join(pieces), stop.value
            if piece is None:
                yield None
            else:
                pieces.append(piece.text)

    def copy_as(
        self, kind: Callable[[str], TextT], form: MendedJson, *stops: str
    ) -> Generator[TextT | None, None, None]:
        """Yield a JSON object or array, converted by `form` to valid JSON, up to its end.

        One of `stops`, which must begin with a line end, also ends the JSON, and stays unread. Missing quotes
        and brackets are added, unless the answer was truncated here.
        """
        while True:
            text, end = form.read(self._text, self._place)
            self._take_to(len(self._text) if end is None else end)
            if form.at_line_end:
                if text:
                    yield kind(text)
                if (stop := (yield from self.accepted(*stops))) is None:
                    continue
                self.unread(stop)
                yield kind(form.close())
                return
            if end is None and self._ended and not self._is_cut:
                text += form.close()
            if text:
                yield kind(text)
            if end is not None or self._ended:
                return
            yield None

    def read_span(self, value: JsonValue) -> Wait[str]:
        """Read and return the text of a JSON value, up to its end or the answer's end."""
        pieces: list[str] = []
        while (end := value.end_in(self._text, self._place)) is None:
            pieces.append(self._take_to(len(self._text)))
            if self._ended:
                return "".join(pieces)
            yield None
        pieces.append(self._take_to(end))
        return "".join(pieces)

    def space(self) -> Wait[str]:
        """Read and return all white space that comes next."""
        pieces: list[str] = []
        while True:
            found = _SPACE.match(self._text, self._place)
            assert found is not None, "it may be empty"
            pieces.append(self._take_to(found.end()))
            if self.num_unread or self._ended:
                return "".join(pieces)
            yield None

    def accept(self, *texts: str) -> Wait[bool]:
        """Read the one of `texts` that comes next, if any, and return True; otherwise read nothing.

        None of `texts` may be a prefix of another.
        """
        return (yield from self.accepted(*texts)) is not None

    def accepted(self, *texts: str) -> Wait[str | None]:
        """Read and return the one of `texts` that comes next; None if there is none. See `accept`."""
        while True:
            for text in texts:
                if self._text.startswith(text, self._place):
                    return self._take_to(self._place + len(text))
            if self._ended or not self._begins_one_of(texts):
                return None
            yield None

    def peek(self) -> Wait[str]:
        """Return the next character without reading it; "" at the answer's end."""
        while not self.num_unread and not self._ended:
            yield None
        return self._text[self._place : self._place + 1]

    def record(self, before: str = "") -> None:
        """Start to record the text that is read. `before`: text that the record begins with."""
        self._record = [before]

    def recorded(self) -> str:
        """Stop recording; return `before` and all text read since `record`. "" if nothing was recorded."""
        text, self._record = "".join(self._record or ()), None
        return text

    @property
    def num_unread(self) -> int:
        return len(self._text) - self._place

    def _begins_one_of(self, texts: tuple[str, ...]) -> bool:
        return any(
            self.num_unread < len(text) and text.startswith(self._text[self._place :]) for text in texts
        )

    def _take_to(self, place: int) -> str:
        taken, self._place = self._text[self._place : place], place
        if self._record is not None:
            self._record.append(taken)
        return taken


class _Marks:
    """Finds the first of several marks in a text, and marks that the end of the text may begin."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        longest_first = sorted(marks, key=len, reverse=True)
        self.find = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)").search
        firsts = "|".join({re.escape(mark[0]) for mark in marks})
        self._find_begins = re.compile(firsts or r"(?!)").finditer
        self._begins = frozenset(mark[:length] for mark in marks for length in range(1, len(mark)))
        self._most = len(longest_first[0]) - 1 if marks else 0

    def undecided(self, text: str, start: int) -> int:
        """Return the length of the longest suffix of `text[start:]` that is an incomplete mark; 0 if none."""
        for begin in self._find_begins(text, max(len(text) - self._most, start)):  # most texts have none
            if text[begin.start() :] in self._begins:
                return len(text) - begin.start()
        return 0


_marks = lru_cache(maxsize=256)(_Marks)
