"""What a dialect has to do: parse an answer, and say by a grammar what a call looks like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shortfin_apps.llm.components.dialects.feed import Feed
from shortfin_apps.llm.components.dialects.lark import Lark
from shortfin_apps.llm.components.dialects.pieces import Parse


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

    def parse(self, feed: Feed, functions: Sequence[Function]) -> Parse:
        """The pieces of an answer, behind its thought; may leave text unread, which is content."""
        ...

    def calls(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        """A Lark expression of one to `most` calls (fewer where it cannot write several)."""
        ...

    def answer(self, lark: Lark, functions: Sequence[Function], most: int) -> str:
        """A Lark expression of any answer, behind its thought, of which what begins a call is a call."""
        ...


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

    def parse_thought(self, feed: Feed, is_open: bool) -> Parse:
        """The pieces of the thought; leaves the text behind it unread."""
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
