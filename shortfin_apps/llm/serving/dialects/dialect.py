"""The interface of a dialect: parse an answer, and describe calls with a grammar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shortfin_apps.llm.serving.dialects.feed import (
    CallParse,
    CallStart,
    Content,
    Feed,
    Parse,
    Reasoning,
)
from shortfin_apps.llm.serving.dialects.lark import Lark


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call. `parameters` is a JSON schema of its arguments, an object.

    If `strict`, arguments fit the schema exactly where a grammar applies, and unenforceable keywords are
    refused. Otherwise such keywords are ignored.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False

    @property
    def owner(self) -> str:
        """How error messages refer to the owner of `parameters`."""
        return f"function `{self.name}`"


class ToolDialect(Protocol):
    """A model family's format of calls. Immutable and shared by requests."""

    @property
    def marks(self) -> frozenset[str]:
        """Texts with a meaning in the format; some tokenizers have special tokens for them."""
        ...

    @property
    def id_chars(self) -> int | None:
        """Exact length of a call's id in letters and digits, if the templates require one."""
        ...

    @property
    def begins(self) -> tuple[str, ...]:
        """Marks that begin calls anywhere, even in an unfinished thought."""
        ...

    def parse(self, feed: Feed, functions: Sequence[Function]) -> Parse:
        """Yields the pieces of an answer after its thought; unread text becomes content.

        Arguments are a JSON object, except at the end of an answer that is cut.
        """
        ...

    def parse_call(self, feed: Feed, functions: Sequence[Function], begin: str) -> CallParse:
        """Yields the calls after `begin`, which has been read; without calls, content including `begin`."""
        ...

    def calls(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        """Returns a Lark expression of one to `most` calls (fewer if it cannot express several)."""
        ...

    def answer(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        """Returns a Lark expression of any answer after its thought; text that begins a call is a call."""
        ...


@dataclass(frozen=True, slots=True)
class Calls:
    """How an answer's calls are written, and to which functions. Without a dialect, calls are not parsed."""

    dialect: ToolDialect | None = None
    functions: Sequence[Function] = ()

    def copy_thought(self, feed: Feed, *ends: str) -> Parse:
        """Yields a thought up to one of its `ends`, which is read.

        A call ends it, too, because models forget to. Text after the call is content, without a later end
        mark.
        """
        kind: type[Content | Reasoning] = Reasoning
        begins = () if self.dialect is None else self.dialect.begins
        while (mark := (yield from feed.copy(kind, *ends, *begins))) is not None and mark not in ends:
            assert self.dialect is not None, "it has begins"
            call = self.dialect.parse_call(feed, self.functions, mark)
            if (yield from _with_text_of(kind, call)):
                kind = Content


class ReasoningDialect(Protocol):
    """A model family's format of thoughts before an answer. Immutable and shared by requests."""

    @property
    def marks(self) -> frozenset[str]: ...

    @property
    def content_begin(self) -> str:
        """Text that precedes content, with or without a thought before it."""
        ...

    def is_open(self, prompt: str) -> bool:
        """Returns True if an answer to the rendered `prompt` begins inside a thought."""
        ...

    def parse_thought(self, feed: Feed, is_open: bool, calls: Calls) -> Parse:
        """Yields the thought's pieces, and leaves the text after it unread. One of `calls` ends it, too."""
        ...

    def thought(self, lark: Lark, prompt: str) -> str:
        """Returns a Lark expression of a thought that may follow `prompt`, and of its separator."""
        ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """One model's format. A part is None if the model does not write it, or it is not parsed."""

    tools: ToolDialect | None = None
    reasoning: ReasoningDialect | None = None

    @property
    def marks(self) -> frozenset[str]:
        parts = [part.marks for part in (self.tools, self.reasoning) if part is not None]
        return frozenset().union(*parts)


NO_DIALECT = Dialect()


def _with_text_of(kind: type[Content | Reasoning], pieces: CallParse) -> CallParse:
    """Yields the same pieces, with content before the first call converted to `kind`."""
    has_call = False
    while True:
        try:
            piece = next(pieces)
        except StopIteration as stop:
            return bool(stop.value)
        has_call = has_call or isinstance(piece, CallStart)
        yield kind(piece.text) if isinstance(piece, Content) and not has_call else piece
