"""Finds out, in another process, whether a grammar compiles within its limits; see trial_process.py."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Callable

from shortfin_apps.llm.components.grammar.compiled import UnusableGrammar
from shortfin_apps.llm.components.grammar.source import GrammarSource
from shortfin_apps.llm.components.grammar.trial_process import TrialLimits
from shortfin_apps.llm.errors import OverloadedError
from shortfin_apps.llm.limited_process import NUM_ANSWERS, LimitedProcess, arguments_of

MAX_AT_ONCE = 4  # trials, which share the processors with the model
TRIAL_PROCESS = "shortfin_apps.llm.components.grammar.trial_process"
LATE_S = 1.0  # by which the clock's limit may be exceeded on a busy machine
SLACK_S = 5.0  # that a trial may take longer than its limits, as its process reads the tokenizer first

logger = logging.getLogger(__name__)


class OverLimitsError(UnusableGrammar):
    """A grammar that takes too much time or memory to compile."""


class Trials:
    """Owns the process and the connections to its workers, which end with this object. For one event loop."""

    def __init__(
        self,
        tokenizer_json: str,
        eos_token_ids: list[int],
        limits: TrialLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts the process, and returns before it has read the tokenizer."""
        self._limits = limits
        self._clock = clock
        owned = LimitedProcess(TRIAL_PROCESS, arguments_of(limits), eos_token_ids, text=tokenizer_json)
        self._workers, self._idle = owned, owned.idle
        self.process, self.close = owned.process, owned.close

    @property
    def are_over(self) -> bool:
        """The process has ended, so that no trial can begin."""
        return self._workers.is_over

    async def run(self, source: GrammarSource) -> None:
        """Returns if `source` can be compiled within the limits, in about the time that it took now.

        Raises UnusableGrammar, and OverloadedError where the process is out of reach. A cancelled trial ends.
        The caller runs at most MAX_AT_ONCE.
        """
        try:
            async with asyncio.timeout(self._limits.wall_s + SLACK_S):
                answers = await self._answers(source)
        except TimeoutError:
            answers = []
        match answers:
            case []:
                raise OverloadedError("no grammar can be compiled now; try again")
            case [_]:
                raise OverLimitsError(_bounds(self._limits))
            case [_, reason] if reason:
                raise UnusableGrammar(reason)

    async def _answers(self, source: GrammarSource) -> list[str | None]:
        """A worker's answers: both, unless it was ended."""
        connection = self._idle.pop() if self._idle else self._new_worker()
        try:
            answers, taken_s = await self._exchange(connection, source)
        except BaseException:
            connection.close()  # ends the worker
            raise
        if len(answers) == NUM_ANSWERS:
            self._idle.append(connection)
            return answers
        connection.close()
        # A process that was suspended ends by the clock when it goes on, and the grammar is not to blame.
        return [] if taken_s > self._limits.wall_s + LATE_S else answers

    async def _exchange(
        self, connection: socket.socket, source: GrammarSource
    ) -> tuple[list[str | None], float]:
        """The worker's answers, and the seconds from the first of them to the end."""
        loop, received, begun_s = asyncio.get_running_loop(), b"", self._clock()
        try:
            await loop.sock_sendall(connection, source.to_json() + b"\n")
            while received.count(b"\n") < NUM_ANSWERS and (part := await loop.sock_recv(connection, 1 << 16)):
                begun_s = begun_s if received else self._clock()
                received += part
        except (BrokenPipeError, ConnectionResetError):
            pass
        return [json.loads(line) for line in received.splitlines()], self._clock() - begun_s

    def _new_worker(self) -> socket.socket:
        try:
            connection = self._workers.new_worker()
        except OSError as error:  # the process has ended, or many wait for it
            logger.warning("grammars cannot be compiled: %s", error)
            raise OverloadedError("no grammar can be compiled now; try again") from None
        connection.setblocking(False)
        return connection


def _bounds(limits: TrialLimits) -> str:
    return (
        f"compiling it takes more than {limits.cpu_s:g} s of a processor, {limits.wall_s:g} s in all or"
        f" {limits.memory_bytes >> 20} MiB; simplify it"
    )
