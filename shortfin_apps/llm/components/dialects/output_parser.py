"""Parses an answer, piece by piece as it is generated, to content, thoughts and tool calls."""

from __future__ import annotations

from collections.abc import Sequence

from shortfin_apps.llm.components.dialects.dialect import Dialect, Function
from shortfin_apps.llm.components.dialects.feed import WHITE_SPACE, Feed
from shortfin_apps.llm.components.dialects.pieces import (
    Arguments,
    CallStart,
    Content,
    Parse,
    Piece,
    Reasoning,
)

Kind = type[Content | Reasoning]


class OutputParser:
    """The parser of one answer. Pieces of the answer join to the same whole however its text was cut.

    `is_open`: the prompt opened a thought. Unless `parallel`, the first call ends the answer, and the rest is
    left out.
    """

    def __init__(
        self,
        dialect: Dialect,
        functions: Sequence[Function] = (),
        *,
        is_open: bool = False,
        parallel: bool = True,
    ) -> None:
        self._feed = Feed()
        self._pieces = _tidied(_first_call(_parse(dialect, self._feed, functions, is_open), parallel))

    def push(self, text: str) -> list[Piece]:
        """The pieces that `text` completes."""
        self._feed.push(text)
        return self._ready()

    def finish(self) -> list[Piece]:
        """The pieces that were held back."""
        self._feed.end()
        return self._ready()

    def _ready(self) -> list[Piece]:
        pieces: list[Piece] = []
        for piece in self._pieces:
            if piece is None:
                break
            pieces.append(piece)
        return joined(pieces)


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The same with neighbours of one kind as one piece."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        if last is None or isinstance(piece, CallStart) or type(piece) is not type(last):
            result.append(piece)
        else:
            assert not isinstance(last, CallStart), "it is of the other's type"
            result[-1] = type(piece)(last.text + piece.text)
    return result


def _parse(dialect: Dialect, feed: Feed, functions: Sequence[Function], is_open: bool) -> Parse:
    if dialect.reasoning is not None:
        yield from dialect.reasoning.parse_thought(feed, is_open)
    if dialect.tools is not None:
        yield from dialect.tools.parse(feed, functions)
    yield from feed.copy(Content)


def _first_call(pieces: Parse, parallel: bool) -> Parse:
    """Without what follows the first call, unless several are wanted."""
    has_call = False
    for piece in pieces:
        is_rest = has_call and not isinstance(piece, Arguments | None)
        if is_rest and not parallel:
            return
        has_call = has_call or isinstance(piece, CallStart)
        yield piece


def _tidied(pieces: Parse) -> Parse:
    """Without empty pieces, and the white space between thoughts, calls and content."""
    run: Kind | None = None  # of which the last text was
    has_text = False  # of this run, whose white space is then kept within
    held = ""  # white space that is left out unless text of its run follows
    for piece in pieces:
        match piece:
            case Content(text) | Reasoning(text):
                kind = type(piece)
                if kind is not run:
                    run, has_text, held = kind, run is None and kind is Content, ""
                text = held + text
                text = text if has_text else text.lstrip(WHITE_SPACE)
                end = text.rstrip(WHITE_SPACE)
                held = text[len(end) :]
                has_text = has_text or bool(end)
                if end:
                    yield kind(end)
            case None:
                yield None
            case Arguments(""):
                pass
            case _:
                run, has_text, held = Content, False, ""
                yield piece
    if run is Content and held:
        yield Content(held)


def whole(
    dialect: Dialect, text: str, functions: Sequence[Function] = (), *, is_open: bool = False
) -> list[Piece]:
    """The pieces of a complete answer."""
    parser = OutputParser(dialect, functions, is_open=is_open)
    return joined([*parser.push(text), *parser.finish()])
