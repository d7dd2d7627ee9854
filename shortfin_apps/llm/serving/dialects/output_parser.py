"""Parses an answer incrementally into content, thoughts and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from shortfin_apps.llm.serving.dialects.dialect import Calls, Dialect, Function
from shortfin_apps.llm.serving.dialects.feed import (
    Arguments,
    CallStart,
    Content,
    Feed,
    Parse,
    Piece,
    Reasoning,
)
from shortfin_apps.llm.serving.dialects.mended_json import WHITE_SPACE

Kind = type[Content | Reasoning]


class OutputParser:
    """A parser of one answer. The joined pieces are the same however the text was split.

    `is_open` means that the prompt opened a thought. Unless `parallel`, the first call ends the answer, and
    the remainder is dropped. `calls_end_thoughts` means that a call in a thought counts, because models
    forget to end thoughts.
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
        """Returns the pieces that `text` completes."""
        self._feed.push(text)
        return self._ready()

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Returns the held-back pieces. If the answer `is_cut`, the last call may be incomplete."""
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
    """Joins adjacent pieces of the same kind."""
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
    """Drops everything after the first call, unless `parallel`."""
    has_call = False
    for piece in pieces:
        is_rest = has_call and not isinstance(piece, Arguments | None)
        if is_rest and not parallel:
            return
        has_call = has_call or isinstance(piece, CallStart)
        yield piece


def _tidied(pieces: Parse) -> Parse:
    """Drops empty pieces, and white space between thoughts, calls and content."""
    run: Kind | None = None  # kind of the last text
    has_text = False  # in the current run; white space within it is then kept
    held: list[str] = []  # white space, dropped unless text of the same run follows
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
    """Returns the pieces of a complete answer."""
    parser = OutputParser(dialect, functions, is_open=is_open)
    return joined([*parser.push(text), *parser.finish(is_cut=is_cut)])
