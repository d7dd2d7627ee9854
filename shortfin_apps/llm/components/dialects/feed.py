"""The text of an answer as it arrives, read by parsers that wait for more of it.

A parser is a generator. It yields pieces, and None where the text that has arrived does not decide what comes
next. Every reader below decides by the text alone, never by where it was cut, so the pieces of an answer join
to the same whole however it was streamed.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol, TypeVar

from shortfin_apps.llm.components.dialects.pieces import Text

TextT_co = TypeVar("TextT_co", bound=Text, covariant=True)
T = TypeVar("T")
Wait = Generator[None, None, T]  # yields None while it waits; returns a T

WHITE_SPACE = " \n\r\t"  # that of JSON


class Kind(Protocol[TextT_co]):
    """Makes a piece of a text."""

    def __call__(self, text: str) -> TextT_co: ...


class Span(Protocol):
    """Finds where something ends that is not marked by a text."""

    def end_in(self, text: str) -> int | None:
        """The place in `text`, which follows that of the last call, where it ends; None if it goes on."""
        ...


class Feed:
    """Text that has arrived and is not read; `push` and `end` are for its writer."""

    def __init__(self) -> None:
        self._text = ""
        self._ended = False
        self._record: list[str] | None = None

    def push(self, text: str) -> None:
        self._text += text

    def end(self) -> None:
        self._ended = True

    def copy(self, kind: Kind[TextT_co], *marks: str) -> Generator[TextT_co | None, None, str | None]:
        """Yields the text up to a mark as it comes, and reads the mark; returns it, None at the answer's end.

        The mark that ends first is found, and the longest of those that end together.
        """
        while True:
            found = self._first(marks)
            end = len(self._text) - self._undecided(marks) if found is None else found[0]
            if end:
                yield kind(self._take(end))
            if found is not None:
                return self._take(len(found[1]))
            if self._ended:
                if self._text:
                    yield kind(self._take(len(self._text)))
                return None
            yield None

    def text_before(self, *marks: str) -> Generator[None, None, tuple[str, str | None]]:
        """The text up to a mark, and the mark, which is read; see `copy`."""
        while (found := self._first(marks)) is None and not self._ended:
            yield None
        if found is None:
            return self._take(len(self._text)), None
        return self._take(found[0]), self._take(len(found[1]))

    def copy_span(self, kind: Kind[TextT_co], span: Span) -> Generator[TextT_co | None, None, None]:
        """Yields the text up to the span's end as it comes."""
        while (end := span.end_in(self._text)) is None:
            if self._text:
                yield kind(self._take(len(self._text)))
            if self._ended:
                return
            yield None
        if end:
            yield kind(self._take(end))

    def read_span(self, span: Span) -> Wait[str]:
        """The text up to the span's end."""
        pieces: list[str] = []
        while (end := span.end_in(self._text)) is None:
            pieces.append(self._take(len(self._text)))
            if self._ended:
                return "".join(pieces)
            yield None
        pieces.append(self._take(end))
        return "".join(pieces)

    def space(self) -> Wait[str]:
        """The white space that comes next."""
        pieces: list[str] = []
        while True:
            rest = self._text.lstrip(WHITE_SPACE)
            pieces.append(self._take(len(self._text) - len(rest)))
            if rest or self._ended:
                return "".join(pieces)
            yield None

    def accept(self, *texts: str) -> Wait[bool]:
        """Whether one of `texts` comes next, which is then read. None of them may begin another."""
        while True:
            for text in texts:
                if self._text.startswith(text):
                    self._take(len(text))
                    return True
            if self._ended or not any(text.startswith(self._text) for text in texts):
                return False
            yield None

    def peek(self) -> Wait[str]:
        """The next character, which stays unread; empty at the answer's end."""
        while not self._text and not self._ended:
            yield None
        return self._text[:1]

    def record(self, before: str = "") -> None:
        """Keeps what is read from here on, after the text `before`."""
        self._record = [before]

    def recorded(self) -> str:
        """The text kept since `record`; ends that."""
        text, self._record = "".join(self._record or ()), None
        return text

    def _first(self, marks: tuple[str, ...]) -> tuple[int, str] | None:
        """The place of the first mark and the mark."""
        places = ((self._text.find(mark), mark) for mark in marks)
        ends = [(place + len(mark), place, mark) for place, mark in places if place >= 0]
        return min(ends)[1:] if ends else None

    def _undecided(self, marks: tuple[str, ...]) -> int:
        """Length of the longest end of the text that begins a mark."""
        longest = max(map(len, marks), default=0)
        tail = self._text[max(len(self._text) - longest + 1, 0) :]
        starts = [place for place in (tail.find(mark[0]) for mark in marks) if place >= 0]
        for place in range(min(starts), len(tail)) if starts else ():  # most texts begin none
            if any(mark.startswith(tail[place:]) for mark in marks):
                return len(tail) - place
        return 0

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        if self._record is not None:
            self._record.append(taken)
        return taken
