"""Parses an answer incrementally into content, reasoning and tool calls."""

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
    """Parses one answer. The joined pieces do not depend on how the text was split.

    `is_open`: the prompt ends inside reasoning. `parallel`: an answer may have several calls; otherwise
    everything after the first call is dropped. `calls_end_thoughts`: a call inside reasoning is parsed and
    ends the reasoning, because models forget the end mark. `is_required`: a grammar allows only calls after
    the reasoning, so that content held back until the answer's end is the start of a cut call, and dropped.
    """

    def __init__(
        self,
        dialect: Dialect,
        functions: Sequence[Function] = (),
        *,
        is_open: bool = False,
        parallel: bool = True,
        calls_end_thoughts: bool = True,
        is_required: bool = False,
    ) -> None:
        self._feed = Feed()
        self._is_required = is_required
        in_thought = Calls(dialect.tools if calls_end_thoughts else None, functions)
        pieces = _parse(dialect, self._feed, functions, is_open, in_thought)
        self._pieces = _tidied(_first_call(pieces, parallel))

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that `text` completes."""
        self._feed.push(text)
        return self._ready()

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Return the remaining pieces at the answer's end.

        `is_cut`: the answer was truncated; then its last call may be incomplete.
        """
        self._feed.end(is_cut=is_cut)
        return [piece for piece in self._ready() if not (self._is_required and isinstance(piece, Content))]

    def _ready(self) -> list[Piece]:
        pieces: list[Piece] = []
        for piece in self._pieces:
            if piece is None:
                break
            pieces.append(piece)
        return joined(pieces)


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Join adjacent pieces of the same kind, except starts of calls."""
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
    """Yield the pieces up to the end of the first call, or all pieces if `parallel`."""
    has_call = False
    for piece in pieces:
        is_rest = has_call and not isinstance(piece, Arguments | None)
        if is_rest and not parallel:
            return
        has_call = has_call or isinstance(piece, CallStart)
        yield piece


def _tidied(pieces: Parse) -> Parse:
    """Yield the pieces without empty ones, and without white space between reasoning, calls and content."""
    run: Kind | None = None  # kind of the current run of text
    has_text = False  # the current run has begun: its inner white space is kept
    held: list[str] = []  # trailing white space, dropped unless text of the same run follows
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
    """Return the pieces of a complete answer."""
    parser = OutputParser(dialect, functions, is_open=is_open)
    return joined([*parser.push(text), *parser.finish(is_cut=is_cut)])
