"""Parses an answer, piece by piece as it is generated, to content, thoughts and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from shortfin_apps.llm.components.dialects.dialect import Calls, Dialect, Function
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
    left out. `calls_end_thoughts`: a call in a thought is one, as models forget to end thoughts.
    """

    def __init__(
        self,
        dialect: Dialect,
        functions: Sequence[Function] = (),
        *,
        is_open: bool = False,
        parallel: bool = True,
        calls_end_thoughts: bool = True,
    ) -> None:
        self._feed = Feed()
        in_thought = Calls(dialect.tools if calls_end_thoughts else None, functions)
        pieces = _parse(dialect, self._feed, functions, is_open, in_thought)
        self._pieces = _tidied(_first_call(pieces, parallel))

    def push(self, text: str) -> list[Piece]:
        """The pieces that `text` completes."""
        self._feed.push(text)
        return self._ready()

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """The pieces that were held back. The last call may be half of one if the answer `is_cut`."""
        self._feed.end(is_cut=is_cut)
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
    for kind, run in groupby(pieces, type):
        if kind is CallStart:
            result += run
        else:
            result.append(kind("".join(piece.text for piece in run if not isinstance(piece, CallStart))))
    return result


def _parse(
    dialect: Dialect, feed: Feed, functions: Sequence[Function], is_open: bool, in_thought: Calls
) -> Parse:
    if dialect.reasoning is not None:
        yield from dialect.reasoning.parse_thought(feed, is_open, in_thought)
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
    held: list[str] = []  # white space that is left out unless text of its run follows
    for piece in pieces:
        match piece:
            case Content(text) | Reasoning(text):
                kind = type(piece)
                if kind is not run:
                    run, has_text, held = kind, run is None and kind is Content, []
                text = text if has_text else text.lstrip(WHITE_SPACE)
                if end := text.rstrip(WHITE_SPACE):
                    yield kind("".join(held) + end)
                    has_text = True
                    held.clear()
                held.append(text[len(end) :])
            case None:
                yield None
            case Arguments(""):
                pass
            case _:
                run, has_text, held = Content, False, []
                yield piece
    if run is Content and (space := "".join(held)):
        yield Content(space)


def whole(
    dialect: Dialect,
    text: str,
    functions: Sequence[Function] = (),
    *,
    is_open: bool = False,
    is_cut: bool = False,
) -> list[Piece]:
    """The pieces of a complete answer."""
    parser = OutputParser(dialect, functions, is_open=is_open)
    return joined([*parser.push(text), *parser.finish(is_cut=is_cut)])
