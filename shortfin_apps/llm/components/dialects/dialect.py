"""What a dialect has to do: parse an answer, and say by a grammar what a call looks like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shortfin_apps.llm.components.dialects.feed import Feed, Kind
from shortfin_apps.llm.components.dialects.lark import Lark
from shortfin_apps.llm.components.dialects.pieces import (
    CallParse,
    CallStart,
    Content,
    Parse,
    Reasoning,
)


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call. `parameters` is a JSON schema of its arguments, an object.

    Arguments of one that is `strict` fit the schema exactly where a grammar applies: a keyword that cannot be
    kept is then refused. For others it is left out.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False

    @property
    def owner(self) -> str:
        """How a refusal of `parameters` names them."""
        return f"function `{self.name}`"


class ToolDialect(Protocol):
    """How models write calls. Immutable and shared by requests."""

    @property
    def marks(self) -> frozenset[str]:
        """Texts with a meaning, which are special tokens in some tokenizers."""
        ...

    @property
    def id_chars(self) -> int | None:
        """The exact length that its templates want of a call's id, in letters and digits."""
        ...

    @property
    def begins(self) -> tuple[str, ...]:
        """Marks that begin calls wherever they are, also in a thought that has no end."""
        ...

    def parse(self, feed: Feed, functions: Sequence[Function]) -> Parse:
        """The pieces of an answer, behind its thought; may leave text unread, which is content.

        Arguments are a JSON object, but those at the end of an answer that is cut.
        """
        ...

    def parse_call(self, feed: Feed, functions: Sequence[Function], begin: str) -> CallParse:
        """The calls behind one of `begins`, which is read; content, with it, if there are none."""
        ...

    def calls(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        """A Lark expression of one to `most` calls (fewer where it cannot write several)."""
        ...

    def answer(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        """A Lark expression of any answer, behind its thought, of which what begins a call is a call."""
        ...


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of an answer: how they are written, and of which functions. None: they are not parsed."""

    dialect: ToolDialect | None = None
    functions: Sequence[Function] = ()

    def copy_thought(self, feed: Feed, *ends: str) -> Parse:
        """A thought up to one of its `ends`, which is read.

        A call ends it, too: models forget to. What follows is content, with the end left out if it comes.
        """
        kind: Kind[Content | Reasoning] = Reasoning
        begins = () if self.dialect is None else self.dialect.begins
        while (mark := (yield from feed.copy(kind, *ends, *begins))) is not None and mark not in ends:
            assert self.dialect is not None, "it has begins"
            call = self.dialect.parse_call(feed, self.functions, mark)
            if (yield from _with_text_of(kind, call)):
                kind = Content


class ReasoningDialect(Protocol):
    """How models write thoughts before their answer. Immutable and shared by requests."""

    @property
    def marks(self) -> frozenset[str]: ...

    @property
    def content_begin(self) -> str:
        """What precedes content, behind a thought or without one."""
        ...

    def is_open(self, prompt: str) -> bool:
        """Whether an answer to the rendered `prompt` begins inside a thought."""
        ...

    def parse_thought(self, feed: Feed, is_open: bool, calls: Calls) -> Parse:
        """The pieces of the thought; leaves the text behind it unread. One of `calls` ends it, too."""
        ...

    def thought(self, lark: Lark, prompt: str) -> str:
        """A Lark expression of the thought that may follow `prompt`, and what separates it from an answer."""
        ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one model writes; None: it has no calls or no thoughts, or they are not parsed."""

    tools: ToolDialect | None = None
    reasoning: ReasoningDialect | None = None

    @property
    def marks(self) -> frozenset[str]:
        parts = [part.marks for part in (self.tools, self.reasoning) if part is not None]
        return frozenset().union(*parts)


NO_DIALECT = Dialect()


def _with_text_of(kind: Kind[Content | Reasoning], pieces: CallParse) -> CallParse:
    """The same, but what is content before the first call is of `kind`."""
    has_call = False
    while True:
        try:
            piece = next(pieces)
        except StopIteration as stop:
            return bool(stop.value)
        has_call = has_call or isinstance(piece, CallStart)
        yield kind(piece.text) if isinstance(piece, Content) and not has_call else piece
