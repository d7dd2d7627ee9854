"""The engine as seen from an API process: a client of the engine's process, over a connection."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shortfin_apps.llm.components.engine.snapshot import Snapshot
from shortfin_apps.llm.components.engine.stats import EngineStats
from shortfin_apps.llm.components.grammar.compiled import CompiledGrammar
from shortfin_apps.llm.components.recorder.dumps import WrittenDump
from shortfin_apps.llm.components.request.messages import Delta, FinishReason, GenerateCall
from shortfin_apps.llm.contract.errors import InvalidRequestError, InvocationError, LlmError, UnavailableError
from shortfin_apps.llm.serving.engine_link.connection import Connection, exchange
from shortfin_apps.llm.serving.engine_link.messages import (
    Abort,
    Admitted,
    Ask,
    Command,
    Counted,
    Deltas,
    DumpWritten,
    EngineState,
    FlushCache,
    FromApi,
    FromEngine,
    Look,
    Order,
    Prepared,
    Refused,
    Seen,
    Serving,
    Submit,
    Welcome,
    WriteDump,
    decoder_from_engine,
)
from shortfin_apps.llm.serving.frontend.admission import Admission
from shortfin_apps.llm.serving.frontend.async_engine import MAX_UNREAD_TOKENS
from shortfin_apps.llm.serving.frontend.delta_stream import DeltaStream
from shortfin_apps.llm.serving.frontend.open_requests import Draining, OpenRequests

logger = logging.getLogger(__name__)

ENGINE_ENDED = "the process of the engine has ended; restart the server, then retry"
# The engine's process sends its state every second, unless a driver's call holds Python's lock there.
MAX_SILENCE_S = 10.0
SILENT = f"the engine's process has sent nothing for more than {MAX_SILENCE_S:.0f} s"


def wait_for_engine(sock: socket.socket) -> Welcome:
    """Report that this process is prepared, and wait until the engine is loaded, without a time limit.

    Raises UnavailableError if the engine's process ends first.
    """
    try:
        welcome = exchange(sock, Prepared(), decoder_from_engine())
    except (EOFError, OSError):
        raise UnavailableError(ENGINE_ENDED) from None
    assert isinstance(welcome, Welcome), "it is the first message"
    return welcome


class RemoteEngine:
    """Implements EngineClient. Callers must call `start` in the event loop of all other calls.

    The engine's process admits requests. This process keeps the streams, aborts requests with slow readers,
    and drains its own requests. `execute` runs a command in this process. `on_lost` is called when the
    engine's process has ended, after every request was answered.
    """

    def __init__(
        self,
        sock: socket.socket,
        welcome: Welcome,
        *,
        execute: Callable[[Command], Sequence[float]],
        on_lost: Callable[[], None] = lambda: None,
        max_unread_tokens: int = MAX_UNREAD_TOKENS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sock = sock
        self._welcome = welcome
        self._execute = execute
        self._lost = on_lost
        self._state = welcome.state
        self._clock = clock
        self._heard_s = math.inf  # when the last state came; none comes until all processes serve
        self._stats = welcome.stats
        no_bounds = Admission(max_requests=sys.maxsize, max_queue_tokens=sys.maxsize, clock=lambda: 0.0)
        self._requests = OpenRequests(no_bounds, max_unread_tokens=max_unread_tokens, abort=self._send_abort)
        self._draining = Draining(self._requests, self.abort_all)
        self._submitted: dict[str, asyncio.Future[None]] = {}  # requests waiting to be admitted
        self._asked: dict[int, asyncio.Future[Any]] = {}  # questions waiting for their answers, by number
        self._numbers = itertools.count()  # of questions
        self._connection = Connection(decoder_from_engine(), self._receive, on_lost=self._on_lost)
        self._opening: asyncio.Task[None] | None = None
        self._is_closed = False

    def start(self) -> None:
        """Open the connection and report that this process serves. Requests may arrive immediately after."""
        self._connection.send(Serving())
        self._opening = asyncio.create_task(self._open())

    async def _open(self) -> None:
        try:
            await self._connection.open(self._sock)
        except Exception:
            logger.exception("the connection to the engine's process could not be opened")
            self._sock.close()
            self._connection.connection_lost(None)

    async def submit(self, call: GenerateCall) -> DeltaStream:
        self._check_available(call.resumes)
        if call.request_id in self._requests:
            raise InvalidRequestError(f"request id {call.request_id!r} is in use", "rid")
        stream = self._requests.admit(call)
        try:
            self._connection.send(_submission(call))
        except Exception:  # the call cannot be encoded, so the engine will not answer
            self._requests.deliver([Delta(call.request_id, finish_reason=FinishReason.ERROR)])
            raise
        if not call.resumes:  # resumed calls are not refused for load, so their steps need not wait
            await self._until_admitted(call.request_id, stream)
        return stream

    def abort(self, request_id: str, error: LlmError | None = None) -> bool:
        if request_id not in self._requests:
            return False
        self._send_abort(request_id, error)
        return True

    def abort_all(self) -> int:
        return sum([self.abort(request_id) for request_id in self._requests])

    def flush_cache(self) -> None:
        self._connection.send(FlushCache())

    async def dump(self, reason: str) -> WrittenDump:
        written: WrittenDump = await self._answer_to(lambda number: WriteDump(number, reason))
        return written

    def stats(self) -> EngineStats:
        """Return the counters as of the last answer to `ask`."""
        return self._stats

    async def ask(self, command: Command) -> Sequence[float]:
        """Run a command in every API process; return the sums of the processes' counts."""
        counts: list[float] = await self._answer_to(lambda number: Ask(number, command))
        return counts

    async def snapshot(self, after: int = 0) -> Snapshot:
        found: Snapshot = await self._answer_to(lambda number: Look(number, after))
        return found

    @property
    def number(self) -> int:
        """The link's number, never reused by another link to the engine."""
        return self._welcome.number

    @property
    def max_requests(self) -> int:
        return self._welcome.max_requests

    @property
    def max_queue_tokens(self) -> int:
        return self._welcome.max_queue_tokens

    @property
    def max_request_tokens(self) -> int:
        return self._welcome.max_request_tokens

    @property
    def returns_logits(self) -> bool:
        return self._welcome.returns_logits

    @property
    def ready(self) -> bool:
        return self._state.ready and not self._connection.is_lost and not self._draining.has_begun

    @property
    def healthy(self) -> bool:
        return self.problem is None

    @property
    def problem(self) -> str | None:
        if self._connection.is_lost:
            return ENGINE_ENDED
        if self._clock() - self._heard_s > MAX_SILENCE_S:
            return SILENT
        return self._state.problem

    async def drain(self, timeout_s: float) -> None:
        await self._draining.drain(timeout_s)

    async def close(self, patience_s: float = math.inf) -> bool:
        """End open requests and the connection; the engine belongs to another process."""
        self._is_closed = True
        self._draining.begin()
        self._requests.answer_all(UnavailableError("the server has shut down"))
        self._connection.close()
        return True

    def _check_available(self, resumes: bool) -> None:
        self._check_connected()
        self._draining.check(resumes)

    def _check_connected(self) -> None:
        if self._connection.is_lost:
            raise UnavailableError(ENGINE_ENDED)

    async def _answer_to(self, question: Callable[[int], FromApi]) -> Any:
        """Send `question(number)`, and return the answer with that number or raise its error."""
        self._check_connected()
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._connection.send(question(number))
            return await answer
        finally:
            del self._asked[number]

    def _answer(self, number: int, answer: object, error: LlmError | None = None) -> None:
        """Pass an answer to the caller that waits in `_answer_to`, unless the caller was cancelled."""
        if (asked := self._asked.get(number)) is None or asked.done():
            return
        if error is not None:
            asked.set_exception(error)
        else:
            asked.set_result(answer)

    async def _until_admitted(self, request_id: str, stream: DeltaStream) -> None:
        """Wait for admission, or raise the engine's refusal. Cancellation aborts the request."""
        admitted = self._submitted[request_id] = asyncio.get_running_loop().create_future()
        try:
            await admitted
        except asyncio.CancelledError:
            stream.close()
            raise
        finally:
            del self._submitted[request_id]

    def _send_abort(self, request_id: str, error: LlmError | None) -> None:
        self._connection.send(Abort(request_id, error))

    def _receive(self, message: FromEngine) -> None:
        match message:
            case Deltas(deltas):
                self._requests.deliver(deltas)
            case Admitted(request_id):
                if (waiting := self._submitted.get(request_id)) is not None and not waiting.done():
                    waiting.set_result(None)
            case Refused(request_id, error):
                self._refuse(request_id, error)
            case EngineState():
                self._state, self._heard_s = message, self._clock()
            case Order(number, command):
                self._connection.send(Counted(number, list(self._execute(command))))
            case Counted(number, counts, stats):
                self._stats = self._stats if stats is None else stats
                self._answer(number, counts)
            case DumpWritten(number, path, num_bytes, failure):
                self._answer(number, WrittenDump(Path(path), num_bytes), failure)
            case Seen(number, found, failure):
                if found is None:
                    failure = failure or InvocationError("the engine's process saw nothing")
                self._answer(number, found, failure)
            case Welcome():
                raise AssertionError("it is the first message, and was read")

    def _refuse(self, request_id: str, error: LlmError) -> None:
        """End a request that the engine has refused; `submit` raises the error if it still waits."""
        self._requests.deliver([Delta(request_id, finish_reason=FinishReason.ERROR, error=error)])
        if (waiting := self._submitted.get(request_id)) is not None and not waiting.done():
            waiting.set_exception(error)

    def _on_lost(self) -> None:
        error = UnavailableError(ENGINE_ENDED)
        self._requests.answer_all(error)
        waiting: list[asyncio.Future[Any]] = [*self._submitted.values(), *self._asked.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(error)
        if not self._is_closed:
            self._lost()


def _submission(call: GenerateCall) -> Submit:
    grammar = call.params.output_grammar
    if grammar is None:
        return Submit(call)
    assert isinstance(grammar, CompiledGrammar), "the front end compiled it"
    without = replace(call, params=replace(call.params, output_grammar=None))
    return Submit(without, grammar.source, grammar.param)
