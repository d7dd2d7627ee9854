"""Interfaces through which the engine asks a grammar which tokens may come next in a request's output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class GrammarMatcher(Protocol):
    """A grammar's state after one request's output so far. Callers must use it from one thread at a time."""

    def allowed(self, generated: Sequence[int], ahead: Sequence[int] = ()) -> bytes:
        """Return a bitmask of the tokens that may follow `generated` plus `ahead`; lowest bit first.

        `generated` is the full output so far, and must extend the previous call's. `ahead` are proposed
        tokens after the output; the next call may drop them. End-of-sequence is allowed where the output is
        complete, and is the only allowed token when nothing can be added. Raises ConstraintError if the
        grammar is too complex to continue, or does not allow `ahead`.
        """
        ...

    def forced(self, generated: Sequence[int]) -> Sequence[int]:
        """Return the tokens that must follow `generated`, as far as they are known.

        Empty if the grammar allows several tokens, or cannot continue. Calls do not change what `allowed`
        returns.
        """
        ...


class Grammar(Protocol):
    """A compiled grammar, shared by requests. Equal grammars share the automata that they build lazily.

    `param` is the request field that holds the grammar, for error messages.
    """

    @property
    def param(self) -> str: ...

    def matcher(self) -> GrammarMatcher:
        """Create a matcher for an empty output. Takes microseconds."""
        ...
