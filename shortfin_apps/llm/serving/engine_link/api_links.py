"""All API processes as seen from the engine's process."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from shortfin_apps.llm.serving.engine_link.api_link import AdmittingEngine, ApiLink, Grammars
from shortfin_apps.llm.serving.engine_link.messages import (
    Ask,
    Command,
    Counted,
    EngineState,
    ReadMetrics,
    SetLogLevel,
    Welcome,
)

logger = logging.getLogger(__name__)

STATE_INTERVAL_S = 0.1  # between two checks of the engine's state
CHECKS_PER_SIGN = 10  # checks after which the state is sent again, as a sign of life

Counts = Sequence[float]


class ApiLinks:
    """Welcomes API processes once the engine is loaded, sends them its state, and forwards their commands.

    The sums of the processes' counters include the last report of each process that has ended, so that no sum
    decreases.
    """

    def __init__(self) -> None:
        self._links: dict[ApiLink, Counts] = {}  # each link with its last reported counters
        self._ended: Counts = ()  # sums over ended processes
        self._numbers = itertools.count(1)
        self._engine: AdmittingEngine | None = None
        self._grammars: Grammars | None = None
        self._state: EngineState | None = None
        self._watching: asyncio.TimerHandle | None = None
        self._num_checks = 0  # of the state
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_serving(self) -> bool:
        """Whether an engine is available, so that prepared processes are welcomed."""
        return self._engine is not None

    async def open(self, sock: socket.socket) -> ApiLink:
        """Open a link to the process at the other end of `sock`."""
        link = ApiLink(sock, on_ask=self._on_ask, on_lost=self._forget)
        self._links[link] = ()
        try:
            await link.open()
        except BaseException:
            del self._links[link]
            raise
        self._run(self._welcome_when_prepared(link))
        return link

    async def serve(self, engine: AdmittingEngine, grammars: Grammars) -> None:
        """Welcome all present processes once all are prepared, and later processes when they are prepared.

        Returns when all present processes serve. No process reports ready before that, because any process
        may get the next request.
        """
        await asyncio.gather(*(link.prepared.wait() for link in self._links))
        self._engine, self._grammars = engine, grammars
        self._state = EngineState(ready=False, problem=engine.problem)
        for link in list(self._links):  # also links opened, and perhaps prepared, in the meantime
            self._welcome(link)
        await asyncio.gather(*(link.serving.wait() for link in self._links if link.is_welcome))
        self._watch()

    def close(self) -> None:
        """Stop watching the engine."""
        if self._watching is not None:
            self._watching.cancel()

    async def carry_out(self, command: Command) -> list[float]:
        """Run a command in every process; return the sums of the processes' counts."""
        if isinstance(command, SetLogLevel):
            logging.getLogger().setLevel(command.level)
        links = [link for link in self._links if link.is_welcome]
        number = next(self._numbers)
        answers = await asyncio.gather(*(link.order(number, command) for link in links))
        if not isinstance(command, ReadMetrics):
            return _sums(answer or () for answer in answers)
        for link, answer in zip(links, answers, strict=True):
            if link in self._links and answer is not None:
                self._links[link] = answer
        return _sums([self._ended, *self._links.values()])

    def _on_ask(self, link: ApiLink, ask: Ask) -> None:
        self._run(self._answer(link, ask))

    async def _answer(self, link: ApiLink, ask: Ask) -> None:
        assert self._engine is not None, "a process asks after its welcome"
        try:
            counts = await self.carry_out(ask.command)
        except Exception:
            link.send(Counted(ask.number, [], self._engine.stats()))  # the client must not wait forever
            raise
        link.send(Counted(ask.number, counts, self._engine.stats()))

    async def _welcome_when_prepared(self, link: ApiLink) -> None:
        await link.prepared.wait()
        try:
            self._welcome(link)
        except Exception:
            link.close()  # the process must not wait forever; it is restarted
            raise

    def _welcome(self, link: ApiLink) -> None:
        """Welcome a process that is prepared and not welcomed yet, if the engine is loaded."""
        engine, grammars, state = self._engine, self._grammars, self._state
        if engine is None or grammars is None or state is None:
            return
        if link.is_welcome or link.lost.is_set() or not link.was_prepared:
            return
        welcome = Welcome(
            number=next(self._numbers),
            max_requests=engine.max_requests,
            max_queue_tokens=engine.max_queue_tokens,
            max_request_tokens=engine.max_request_tokens,
            returns_logits=engine.returns_logits,
            state=state,
            stats=engine.stats(),
        )
        link.serve(engine, grammars, welcome)

    def _watch(self) -> None:
        """Send the engine's state to every process if it changed or is due, and schedule the next check."""
        assert self._engine is not None, "there is nothing to look at before"
        self._watching = asyncio.get_running_loop().call_later(STATE_INTERVAL_S, self._watch)
        self._num_checks += 1
        state = _state_of(self._engine)
        if state != self._state or self._num_checks % CHECKS_PER_SIGN == 0:
            self._state = state
            for link in self._links:
                link.tell(state)

    def _forget(self, link: ApiLink) -> None:
        self._ended = _sums([self._ended, self._links.pop(link)])

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a message of an API process could not be answered", exc_info=error)


def _state_of(engine: AdmittingEngine) -> EngineState:
    return EngineState(ready=engine.ready, problem=engine.problem)


def _sums(counts: Iterable[Counts]) -> list[float]:
    return [sum(column) for column in itertools.zip_longest(*counts, fillvalue=0.0)]
