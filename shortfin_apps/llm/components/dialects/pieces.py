"""What a parser finds in an answer: pieces of content, of thoughts, and of tool calls."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass


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
    """A call of the function `name` begins."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """JSON text of the arguments of the call that began last."""

    text: str


Text = Content | Reasoning | Arguments
Piece = Text | CallStart
Parse = Generator[Piece | None, None, None]  # None: more text is needed, or the answer's end
CallParse = Generator[Piece | None, None, bool]  # the same; returns whether there is a call
