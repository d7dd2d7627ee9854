"""Tests in another process whether a grammar compiles within limits; remembers refused grammars."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable

from shortfin_apps.llm.components.grammar.compiled import UnusableGrammar
from shortfin_apps.llm.components.grammar.source import GrammarSource
from shortfin_apps.llm.components.grammar.trial_process import TrialLimits
from shortfin_apps.llm.contract.errors import OverloadedError
from shortfin_apps.llm.limited_process import Clock, LimitedProcess, Workers, arguments_of

MAX_AT_ONCE = 4  # trials share the processors with the model
TRIAL_PROCESS = "shortfin_apps.llm.components.grammar.trial_process"


class OverLimitsError(UnusableGrammar):
    """A grammar that needs too much time or memory to compile."""


class Trials:
    """Owns the trial process and the connections to its workers. Callers must use one event loop."""

    def __init__(
        self,
        tokenizer_json: str,
        eos_token_ids: list[int],
        limits: TrialLimits,
        clock: Clock = time.monotonic,
    ) -> None:
        """Start the process without waiting until it has read the tokenizer."""
        self._limits = limits
        self._owned = LimitedProcess(TRIAL_PROCESS, arguments_of(limits), eos_token_ids, text=tokenizer_json)
        self._workers = Workers("grammars", limits, clock)
        self.process = self._owned.process

    @property
    def are_over(self) -> bool:
        """True if the process has ended, so that no trial can start."""
        return self._owned.is_over

    def close(self) -> None:
        """End the process; a running trial ends at its limits, or when its `run` is cancelled."""
        self._workers.close()
        self._owned.close()

    async def run(self, source: GrammarSource) -> None:
        """Compile `source` in a worker. Raises UnusableGrammar if it does not compile within the limits.

        Compiling the grammar again then takes about as long. Raises OverloadedError if the process cannot be
        reached. Cancelling this call ends the trial. Callers must run at most MAX_AT_ONCE trials at once.
        """
        match await self._workers.ask_in_loop(source.to_json() + b"\n", self._owned.new_worker):
            case []:
                raise OverloadedError("no grammar can be compiled now; try again")
            case [_]:
                raise OverLimitsError(_bounds(self._limits))
            case [_, reason] if reason:
                raise UnusableGrammar(reason)


def _bounds(limits: TrialLimits) -> str:
    return (
        f"compiling it takes more than {limits.cpu_s:g} s of a processor, {limits.wall_s:g} s in all or"
        f" {limits.memory_bytes >> 20} MiB; simplify it"
    )


MAX_REFUSALS = 1024
OVER_LIMITS_S = 60.0  # how long OverLimitsError is remembered: perhaps the machine was just busy


class Refusals:
    """The last MAX_REFUSALS refused grammars of one tokenizer, by digest, because a source may be long."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refused: OrderedDict[bytes, tuple[str, float | None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._refused)

    def check(self, source: GrammarSource) -> None:
        """Raise UnusableGrammar if the grammar was refused before."""
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
