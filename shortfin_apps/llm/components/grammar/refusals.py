"""Remembers refused grammars, so that they are not tried again."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable

from shortfin_apps.llm.components.grammar.compiled import UnusableGrammar
from shortfin_apps.llm.components.grammar.source import GrammarSource
from shortfin_apps.llm.components.grammar.trials import OverLimitsError

MAX_REFUSALS = 1024
OVER_LIMITS_S = 60.0  # limits may have been exceeded because the machine was busy


class Refusals:
    """The last MAX_REFUSALS refused grammars of one tokenizer, as digests, because a source may be long."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refused: OrderedDict[bytes, tuple[str, float | None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._refused)

    def check(self, source: GrammarSource) -> None:
        """Raises UnusableGrammar if the grammar was refused before."""
        digest = _digest(source)
        if (known := self._refused.get(digest)) is None:
            return
        reason, until_s = known
        if until_s is not None and self._clock() >= until_s:
            del self._refused[digest]
            return
        self._refused.move_to_end(digest)
        raise UnusableGrammar(reason)

    def add(self, source: GrammarSource, refusal: UnusableGrammar) -> None:
        until_s = self._clock() + OVER_LIMITS_S if isinstance(refusal, OverLimitsError) else None
        self._refused[_digest(source)] = (str(refusal), until_s)
        if len(self._refused) > MAX_REFUSALS:
            self._refused.popitem(last=False)


def _digest(source: GrammarSource) -> bytes:
    return hashlib.sha256(source.to_json()).digest()
