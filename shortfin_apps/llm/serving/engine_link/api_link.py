"""One API process as seen from the engine's process: its requests, and the connection to it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from shortfin_apps.llm.components.grammar.source import GrammarSource
from shortfin_apps.llm.components.request.grammar import Grammar
from shortfin_apps.llm.components.request.messages import Delta, GenerateCall
from shortfin_apps.llm.contract.errors import InvocationError, LlmError, RequestAbortedError
from shortfin_apps.llm.serving.engine_link.connection import Connection
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
    Look,
    Message,
    Order,
    Prepared,
    Refused,
    Seen,
    Serving,
    Submit,
    Welcome,
    WriteDump,
    decoder_from_api,
)
from shortfin_apps.llm.serving.frontend.delta_stream import DeltaStream
from shortfin_apps.llm.serving.frontend.engine_client import EngineClient

logger = logging.getLogger(__name__)

ANSWER_S = 1.0  # how long a process may take to execute a command


class AdmittingEngine(EngineClient, Protocol):
    """An engine in this process, which admits a request immediately."""

    def admit(self, call: GenerateCall) -> DeltaStream: ...


class Grammars(Protocol):
    """Compiles grammars that another process has compiled before; see `GrammarCompiler`."""

    async def compile_tried(self, source: GrammarSource, param: str, tenant: str) -> Grammar: ...


class ApiLink:
    """Admits the requests of one API process, and sends it the deltas of each step in one message.

    `on_ask` runs a command in all processes. `on_lost` is called when the process has ended, after its
    requests were aborted. While the process does not read, the deltas stay in the requests' streams, where
    the limit on unread tokens eventually ends the requests.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        on_ask: Callable[[ApiLink, Ask], None],
        on_lost: Callable[[ApiLink], None],
    ) -> None:
        self._sock = sock
        self._on_ask = on_ask
        self._on_lost = on_lost
        self._connection = Connection(
            decoder_from_api(), self._receive, on_lost=self._lose, on_free=self._send_deltas
        )
        self._engine: AdmittingEngine | None = None
        self._grammars: Grammars | None = None
        self._streams: dict[str, DeltaStream] = {}
        self._told: dict[str, DeltaStream] = {}  # streams with unread deltas
        self._compiling: dict[str, asyncio.Task[None]] = {}
        self._looks: set[asyncio.Task[None]] = set()
        self._orders: dict[int, asyncio.Future[list[float]]] = {}
        self._dumping: set[asyncio.Task[None]] = set()
        self.prepared = asyncio.Event()  # set when the process waits for the engine, or has ended
        self.serving = asyncio.Event()  # set when the process accepts requests, or has ended
        self.lost = asyncio.Event()
        self.was_prepared = False
        self.is_welcome = False

    async def open(self) -> None:
        await self._connection.open(self._sock)

    def serve(self, engine: AdmittingEngine, grammars: Grammars, welcome: Welcome) -> None:
        """Welcome a prepared process, which may then send requests."""
        self._engine, self._grammars = engine, grammars
        self.is_welcome = True
        self.send(welcome)

    def send(self, message: Message) -> None:
        self._connection.send(message)

    def close(self) -> None:
        """Close the connection, which makes the process exit."""
        self._connection.close()

    def tell(self, state: EngineState) -> None:
        if self.is_welcome:
            self.send(state)

    async def order(self, number: int, command: Command) -> list[float] | None:
        """Send a command to the process and return the counts; None without an answer in ANSWER_S."""
        answer = self._orders[number] = asyncio.get_running_loop().create_future()
        self.send(Order(number, command))
        try:
            return await asyncio.wait_for(answer, ANSWER_S)
        except TimeoutError:
            return None
        finally:
            del self._orders[number]

    def _receive(self, message: FromApi) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Abort(request_id, error):
                self._abort(request_id, error)
            case FlushCache():
                self._running_engine.flush_cache()
            case Look(number, after):
                look = asyncio.ensure_future(self._look(number, after))
                self._looks.add(look)
                look.add_done_callback(self._looks.discard)
            case Ask():
                self._on_ask(self, message)
            case WriteDump():
                self._run(self._write_dump(self._running_engine, message))
            case Counted(number, counts):
                if (order := self._orders.get(number)) is not None and not order.done():
                    order.set_result(counts)
            case Prepared():
                self.was_prepared = True
                self.prepared.set()
            case Serving():
                self.serving.set()

    @property
    def _running_engine(self) -> AdmittingEngine:
        assert self._engine is not None, "a process sends requests after its welcome"
        return self._engine

    def _submit(self, message: Submit) -> None:
        if message.grammar is None:
            self._admit(message.call)
            return
        request_id = message.call.request_id
        task = asyncio.ensure_future(
            self._compile_and_admit(message.call, message.grammar, message.grammar_param)
        )
        self._compiling[request_id] = task

    async def _compile_and_admit(self, call: GenerateCall, source: GrammarSource, param: str) -> None:
        assert self._grammars is not None, "a process sends requests after its welcome"
        try:
            grammar = await self._grammars.compile_tried(source, param, call.terms.tenant)
        except Exception as error:
            del self._compiling[call.request_id]
            self.send(Refused(call.request_id, _told(error)))
            return
        del self._compiling[call.request_id]  # from now on, the engine handles aborts
        self._admit(replace(call, params=replace(call.params, output_grammar=grammar)))

    async def _look(self, number: int, after: int) -> None:
        try:
            self.send(Seen(number, await self._running_engine.snapshot(after)))
        except Exception as error:
            self.send(Seen(number, error=_told(error)))

    def _admit(self, call: GenerateCall) -> None:
        try:
            stream = self._running_engine.admit(call)
        except Exception as error:  # an error in one request must not close the connection
            self.send(Refused(call.request_id, _told(error)))
            return
        self._streams[call.request_id] = stream
        stream.on_delta = partial(self._tell, call.request_id, stream)
        self.send(Admitted(call.request_id))

    def _abort(self, request_id: str, error: LlmError | None) -> None:
        if (task := self._compiling.pop(request_id, None)) is not None:
            task.cancel()
            self.send(Refused(request_id, error or RequestAbortedError("the request was aborted")))
        elif request_id in self._streams:
            self._running_engine.abort(request_id, error)

    def _tell(self, request_id: str, stream: DeltaStream) -> None:
        """Mark a stream as having new deltas. A step marks all its streams in one event loop iteration."""
        if not self._told:
            asyncio.get_running_loop().call_soon(self._send_deltas)
        self._told[request_id] = stream

    def _send_deltas(self) -> None:
        if self._connection.is_held_up or not self._told:
            return
        told, self._told = self._told, {}
        deltas = [delta for stream in told.values() if (delta := stream.take()) is not None]
        for delta in deltas:
            self._forget_ended(delta)
        self.send(Deltas(deltas))

    def _forget_ended(self, delta: Delta) -> None:
        if delta.finish_reason is not None:
            del self._streams[delta.request_id]

    async def _write_dump(self, engine: AdmittingEngine, asked: WriteDump) -> None:
        try:
            written = await engine.dump(asked.reason)
        except Exception as error:
            shown = error if isinstance(error, LlmError) else LlmError(f"no dump was written: {error}")
            self.send(DumpWritten(asked.number, error=shown))
        else:
            self.send(DumpWritten(asked.number, str(written.path), written.num_bytes))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._dumping.add(task)
        task.add_done_callback(self._dumping.discard)

    def _lose(self) -> None:
        for task in [*self._compiling.values(), *self._looks]:
            task.cancel()
        self._compiling.clear()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.close()  # aborts the request
        self._told.clear()
        for order in self._orders.values():
            if not order.done():
                order.set_exception(TimeoutError("the process has ended"))
        if streams:
            logger.warning("an API process has ended; its %d requests are aborted", len(streams))
        self.is_welcome = False
        self.prepared.set()
        self.serving.set()
        self.lost.set()
        self._on_lost(self)


def _told(error: Exception) -> LlmError:
    """Return the error to send to the API process, so that no request there waits forever."""
    if isinstance(error, LlmError):
        return error
    logger.error("a request of an API process failed; please report this bug", exc_info=error)
    return InvocationError("the engine failed; the request was ended")
