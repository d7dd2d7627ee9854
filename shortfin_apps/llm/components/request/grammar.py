"""Interfaces through which the engine asks a grammar which tokens may come next in a request's output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Bitmask = bytes | memoryview  # a bit per token ID, lowest first, in octets


@dataclass(slots=True)
class NextMask:
    """The tokens that a request's grammar allows after `num_generated` tokens, if that is not -1.

    `is_awaited`: a draw on the device waits for each mask, so it is computed as soon as a token is known.
    """

    bitmask: Bitmask = b""
    num_generated: int = -1
    is_awaited: bool = False


class GrammarMatcher(Protocol):
    """A grammar's state after one request's output so far. Callers must use it from one thread at a time."""

    def allowed(self, generated: Sequence[int], ahead: Sequence[int] = ()) -> Bitmask:
        """Return a bitmask of the tokens that may follow `generated` plus `ahead`, valid until the next call.

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
