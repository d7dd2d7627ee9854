"""Grammars, as the engine sees them: which tokens may come next in a request's output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class GrammarMatcher(Protocol):
    """The state of one request's output in its grammar; used by one thread at a time."""

    def allowed(self, generated: Sequence[int], ahead: Sequence[int] = ()) -> bytes:
        """Which tokens may follow `generated`, all tokens of the output so far: a bit each, lowest first.

        The output only grows from call to call. Behind it may stand tokens `ahead`, which are only proposed:
        the next call may be without them. End-of-sequence is allowed where the output is complete, and is all
        that is when nothing can be added. Raises ConstraintError when the grammar is too complex to go on, or
        does not allow those ahead.
        """
        ...

    def forced(self, generated: Sequence[int]) -> Sequence[int]:
        """The tokens that must follow `generated`, as far as that is known; none if there is a choice.

        A call changes nothing about what is allowed. A grammar that cannot go on forces nothing.
        """
        ...


class Grammar(Protocol):
    """A compiled grammar, shared by requests. Those that are equal share their work, too.

    `param` is the request's field with the grammar, for errors.
    """

    @property
    def param(self) -> str: ...

    def matcher(self) -> GrammarMatcher:
        """A new one, for an empty output. Takes microseconds."""
        ...
