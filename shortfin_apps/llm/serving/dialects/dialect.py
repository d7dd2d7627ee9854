"""The interfaces of a dialect: it parses an answer's reasoning and tool calls, and writes their grammar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

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
    """A function that the model may call. `parameters`: the JSON schema of its arguments, an object.

    `strict`: a grammar enforces the whole schema, and keywords that it cannot enforce are refused. Without
    `strict`, a grammar ignores such keywords.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False

    @property
    def owner(self) -> str:
        """The function as error messages about `parameters` name it."""
        return f"function `{self.name}`"


class ToolDialect(Protocol):
    """A model family's format of tool calls. Immutable and shared by requests."""

    @property
    def marks(self) -> frozenset[str]:
        """The delimiters of the format; some tokenizers have special tokens for these texts."""
        ...

    @property
    def id_chars(self) -> int | None:
        """The exact length of a call's id (letters and digits) that chat templates require; None: any."""
        ...

    @property
    def begins(self) -> tuple[str, ...]:
        """The marks that begin calls anywhere in an answer, even inside reasoning."""
        ...

    def parse(self, feed: Feed, functions: Sequence[Function]) -> Parse:
        """Yield the pieces of an answer after its reasoning. Text that is left unread becomes content.

        Arguments are complete JSON objects, except at the end of a truncated answer.
        """
        ...

    def parse_call(self, feed: Feed, functions: Sequence[Function], begin: str) -> CallParse:
        """Yield the calls after the mark `begin`, which has been read; return True if there was a call.

        If no call follows, yields `begin` and the text read after it as content.
        """
        ...

    def calls(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        """Return a Lark expression of one to `most` calls, or of one call if the format has only one."""
        ...

    def answer(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        """Return a Lark expression of any answer after its reasoning, in which every call is valid.

        After a mark that begins a call, only a valid call matches.
        """
        ...


@dataclass(frozen=True, slots=True)
class Calls:
    """The format and functions of calls inside reasoning. Without `dialect`, such calls are not parsed."""

    dialect: ToolDialect | None = None
    functions: Sequence[Function] = ()

    def copy_thought(self, feed: Feed, *ends: str) -> Parse:
        """Yield reasoning up to one of the end marks `ends`, and drop the mark.

        A tool call also ends the reasoning, because models may forget the end mark. Text after the call is
        content. If an end mark follows later, it is dropped, and this method returns.
        """
        kind: type[Content | Reasoning] = Reasoning
        yield Reasoning("")  # white space after an empty one is dropped, too
        begins = () if self.dialect is None else self.dialect.begins
        while (mark := (yield from feed.copy(kind, *ends, *begins))) is not None and mark not in ends:
            assert self.dialect is not None, "it has begins"
            call = self.dialect.parse_call(feed, self.functions, mark)
            if (yield from _with_text_of(kind, call)):
                kind = Content


class ThoughtMarks(NamedTuple):
    """Texts that begin the reasoning, empty if the prompt has begun it, and texts that end it."""

    begins: tuple[str, ...]
    ends: tuple[str, ...]


class ReasoningDialect(Protocol):
    """A model family's format of reasoning before an answer. Immutable and shared by requests."""

    @property
    def marks(self) -> frozenset[str]: ...

    @property
    def content_begin(self) -> str:
        """The text that must precede content, with or without reasoning before; usually empty."""
        ...

    def is_open(self, prompt: str) -> bool:
        """Return True if the rendered `prompt` ends inside reasoning, so that the answer begins there."""
        ...

    def parse_thought(self, feed: Feed, is_open: bool, calls: Calls) -> Parse:
        """Yield the pieces of the reasoning, which a call may end; leave the text after it unread."""
        ...

    def thought(self, lark: Lark, prompt: str) -> str:
        """Return a Lark expression of the reasoning that may follow `prompt`, with the separator after it."""
        ...

    def thought_marks(self, prompt: str) -> ThoughtMarks | None:
        """Return the delimiters of the reasoning that may follow `prompt`; None if none may follow."""
        ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """One model's format. `tools`, `reasoning`: None if the model has none or its text is not parsed."""

    tools: ToolDialect | None = None
    reasoning: ReasoningDialect | None = None

    @property
    def marks(self) -> frozenset[str]:
        parts = [part.marks for part in (self.tools, self.reasoning) if part is not None]
        return frozenset().union(*parts)


NO_DIALECT = Dialect()


def _with_text_of(kind: type[Content | Reasoning], pieces: CallParse) -> CallParse:
    """Yield the pieces, with content before the first call converted to `kind`; return True after a call."""
    has_call = False
    while True:
        try:
            piece = next(pieces)
        except StopIteration as stop:
            return bool(stop.value)
        has_call = has_call or isinstance(piece, CallStart)
        yield kind(piece.text) if isinstance(piece, Content) and not has_call else piece
