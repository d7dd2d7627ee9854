"""Pieces of a parsed answer: content, thoughts and tool calls."""

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
