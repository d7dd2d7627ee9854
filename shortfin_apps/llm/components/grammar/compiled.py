"""Grammars of the llguidance library, compiled for one tokenizer, and their state along an output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher

from shortfin_apps.llm.components.request.grammar import GrammarMatcher
from shortfin_apps.llm.errors import InvocationError

PROBED_TOKENS = 4  # what a grammar costs too much for shows at its first tokens


_SHORT_REASONS = {"NoExtensionBias": "nothing matches it", "": "no reason is given"}


class CompiledGrammar:
    """Implements Grammar. `start` is at the beginning of an output, and stays there: matchers are copies.

    Copies share the automata that `start` builds as it goes, behind a lock.
    """

    def __init__(self, start: LLMatcher) -> None:
        self._start = start

    def matcher(self) -> GrammarMatcher:
        return CompiledMatcher(self._start.deep_copy())

    def problem(self) -> str:
        """Why no output can begin as the grammar says, empty if one can; builds the first automata."""
        probe = self._start.deep_copy()
        for _ in range(PROBED_TOKENS):
            if probe.is_stopped():
                break
            allowed = np.unpackbits(np.frombuffer(probe.compute_bitmask(), np.uint8), bitorder="little")
            if probe.is_error() or not probe.consume_token(int(allowed.argmax())):
                break
        return error_of(probe)


class CompiledMatcher:
    """Implements GrammarMatcher."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._num_consumed = 0

    def allowed(self, generated: Sequence[int]) -> bytes:
        self._matcher.consume_tokens(list(generated[self._num_consumed :]))
        self._num_consumed = len(generated)
        bitmask = self._matcher.compute_bitmask()
        if problem := error_of(self._matcher):
            raise InvocationError(f"the grammar failed after {len(generated)} tokens: {problem}")
        return bitmask


def error_of(matcher: LLMatcher) -> str:
    """Its error in one line, without the state that the library may add; empty if there is none."""
    if not matcher.is_error():
        return ""
    text = matcher.get_error().partition("<state>")[0].partition("<non-verbose/>")[0]
    reason = " ".join(text.split())
    return _SHORT_REASONS.get(reason, reason)
