"""The text of an answer as it arrives, read by parsers that wait for more of it.

A parser is a generator. It yields pieces, and None when it needs more text to decide what comes next. Every
reader below decides by the text alone, never by chunk boundaries, so the joined pieces of an answer are the
same however it was streamed.
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
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of a thought."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of a call of the function `name`."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """JSON text of the last started call's arguments."""

    text: str


Text = Content | Reasoning | Arguments
Piece = Text | CallStart
Parse = Generator[Piece | None, None, None]  # yields None if it needs more text, or the answer's end
CallParse = Generator[Piece | None, None, bool]  # the same; returns True if there is a call


TextT = TypeVar("TextT", bound=Text)
T = TypeVar("T")
Wait = Generator[None, None, T]  # yields None while waiting; returns a T

_SPACE = re.compile(f"[{WHITE_SPACE}]*")


class Feed:
    """Text that has arrived but is not read; `push` and `end` are for its writer.

    Each character is examined a bounded number of times, however the text is split: a reader immediately
    takes text that cannot be a mark, so while it waits, at most the beginning of a mark is unread.
    """

    def __init__(self) -> None:
        self._text = ""
        self._place = 0  # of the first unread character
        self._ended = False
        self._is_cut = False
        self._record: list[str] | None = None

    @property
    def is_cut(self) -> bool:
        """True if the answer ended before the model ended it."""
        return self._is_cut

    def push(self, text: str) -> None:
        self._text, self._place = self._text[self._place :] + text, 0

    def end(self, *, is_cut: bool = False) -> None:
        self._ended, self._is_cut = True, is_cut

    def unread(self, text: str) -> None:
        """Puts back the mark or text that was read last."""
        if self._record is not None:
            last = self._record.pop()
            assert last == text
        self._place -= len(text)
        assert self._text.startswith(text, self._place)

    def copy(self, kind: Callable[[str], TextT], *marks: str) -> Generator[TextT | None, None, str | None]:
        """Yields text up to a mark as it arrives; reads and returns the mark, or None at the answer's end.

        The first mark is found; of marks that begin or end together, the longest. No mark may be in the
        middle of another.
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
        """Returns the text up to a mark, and the mark, which is read; see `copy`."""
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
        """Yields the text up to its end in another form, and its missing end, unless the answer is cut.

        One of `stops`, which begin with a line end, ends it, too, and stays unread.
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
        """Returns the text of the value, up to its end."""
        pieces: list[str] = []
        while (end := value.end_in(self._text, self._place)) is None:
            pieces.append(self._take_to(len(self._text)))
            if self._ended:
                return "".join(pieces)
            yield None
        pieces.append(self._take_to(end))
        return "".join(pieces)

    def space(self) -> Wait[str]:
        """Reads and returns the next white space."""
        pieces: list[str] = []
        while True:
            found = _SPACE.match(self._text, self._place)
            assert found is not None, "it may be empty"
            pieces.append(self._take_to(found.end()))
            if self.num_unread or self._ended:
                return "".join(pieces)
            yield None

    def accept(self, *texts: str) -> Wait[bool]:
        """Reads one of `texts` if it comes next; returns True if so. No text may be a prefix of another."""
        return (yield from self.accepted(*texts)) is not None

    def accepted(self, *texts: str) -> Wait[str | None]:
        """Reads and returns the one of `texts` that comes next, or None; see `accept`."""
        while True:
            for text in texts:
                if self._text.startswith(text, self._place):
                    return self._take_to(self._place + len(text))
            if self._ended or not self._begins_one_of(texts):
                return None
            yield None

    def peek(self) -> Wait[str]:
        """Returns the next character without reading it; empty at the answer's end."""
        while not self.num_unread and not self._ended:
            yield None
        return self._text[self._place : self._place + 1]

    def record(self, before: str = "") -> None:
        """Starts recording the text that is read, after the text `before`."""
        self._record = [before]

    def recorded(self) -> str:
        """Stops recording; returns the text since `record`."""
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
    """A finder of marks in a text."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        longest_first = sorted(marks, key=len, reverse=True)
        self.find = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)").search
        firsts = "|".join({re.escape(mark[0]) for mark in marks})
        self._find_begins = re.compile(firsts or r"(?!)").finditer
        self._begins = frozenset(mark[:length] for mark in marks for length in range(1, len(mark)))
        self._most = len(longest_first[0]) - 1 if marks else 0

    def undecided(self, text: str, start: int) -> int:
        """Returns the length of the longest suffix of the text after `start` that begins a mark."""
        for begin in self._find_begins(text, max(len(text) - self._most, start)):  # most texts have none
            if text[begin.start() :] in self._begins:
                return len(text) - begin.start()
        return 0


_marks = lru_cache(maxsize=256)(_Marks)
