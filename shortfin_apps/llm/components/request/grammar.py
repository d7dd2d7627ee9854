"""Interfaces of grammars for the engine: which tokens may come next in a request's output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class GrammarMatcher(Protocol):
    """State of one request's output in its grammar; used by one thread at a time."""

    def allowed(self, generated: Sequence[int], ahead: Sequence[int] = ()) -> bytes:
        """Bitmask of the tokens that may follow `generated`, the full output so far; lowest bit first.

        The output only grows between calls. `ahead` are proposed tokens that may follow the output; the next
        call may be without them. End-of-sequence is allowed where the output is complete, and is the only
        token allowed when nothing can be added. Raises ConstraintError if the grammar is too complex to
        continue, or does not allow `ahead`.
        """
        ...

    def forced(self, generated: Sequence[int]) -> Sequence[int]:
        """Tokens that must follow `generated`, as far as known; empty if there is a choice.

        Calls do not change what is allowed. A grammar that cannot continue forces nothing.
        """
        ...


class Grammar(Protocol):
    """A compiled grammar, shared by requests. Equal grammars also share their work.

    `param` is the request field that holds the grammar, for errors.
    """

    @property
    def param(self) -> str: ...

    def matcher(self) -> GrammarMatcher:
        """Create a matcher for an empty output. Takes microseconds."""
        ...
