"""Server-sent events, written in turns shared by all streams; and cancellation when a client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from shortfin_apps.llm.contract.errors import LlmError, RequestAbortedError
from shortfin_apps.llm.lone_surrogates import json_of
from shortfin_apps.llm.serving.frontend.text_stream import TextDelta, TextStream, close_all
from shortfin_apps.llm.serving.http.access_log import access_of
from shortfin_apps.llm.serving.http.errors import answer_to
from shortfin_apps.llm.serving.http.json_response import work_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


# Unicode line ends that JSON does not escape; some clients split streams at them.
LINE_ENDS = tuple((char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\x85\u2028\u2029")


def json_line(value: object) -> bytes:
    """Return the JSON of a value with Unicode line ends escaped."""
    data = json_of(value)
    if not data.isascii():
        for line_end, escape in LINE_ENDS:
            data = data.replace(line_end, escape)
    return data


def event(data: object) -> bytes:
    """Encode a server-sent event with a JSON payload."""
    return b"data: " + json_line(data) + b"\n\n"


def named_event(data: Mapping[str, object]) -> bytes:
    """Encode a server-sent event, named after its payload's `type`."""
    return f"event: {data['type']}\n".encode() + event(data)


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; if the client disconnects, cancel it and raise RequestAbortedError.

    Callers must have read the request's body. Starlette itself cancels only streaming responses.
    """
    return await race(request.receive, work)


class Events(Protocol):
    """Encodes a stream's server-sent events.

    `done`: bytes that mark the end of a stream, also after an error.
    """

    done: bytes

    def first(self) -> bytes:
        """Return the bytes that depend on no token; they are sent with the first event."""
        ...

    def of(self, index: int, delta: TextDelta) -> bytes:
        """Encode a delta of stream `index` (a prompt's choice); empty if there is nothing to send yet."""
        ...

    def last(self) -> bytes:
        """Return the bytes that follow all deltas."""
        ...

    def failed(self, error: Exception) -> bytes:
        """Encode an error that occurred after the status was sent."""
        ...


class EventStream(Response):
    """Sends `events` for the output of `streams` as it is generated; closes `streams` at the end.

    The status is sent with the first event. An earlier error is raised, so that the answer has the error's
    status, and a router may retry on another server; a later error becomes the last event. If nothing was
    sent for `StreamTurns.keep_alive_s`, a comment is sent, after the status if necessary, so that no proxy
    closes the connection.

    New output is sent in a turn of StreamTurns, shared by all streams. The request's own task only sends
    pieces held up by a full buffer, and the end.
    """

    media_type = "text/event-stream"
    has_comments: ClassVar[bool] = True  # whether clients skip comments in this media type

    def __init__(self, request: Request, events: Events, streams: Sequence[TextStream]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._request = request
        self._events = events
        self._streams = streams
        self._num_open = len(streams)
        self._turns: StreamTurns = request.app.state.stream_turns
        self._first = b""  # sent with the first event
        self._told: list[int] = []  # streams with new output
        self._unsent: list[bytes] = []
        self._error: Exception | None = None  # the reason why the stream ends early
        self._wakes = asyncio.Event()  # set when the task has something to do

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._body = StreamedBody(self._start(), send, on_held_up=self._wakes.set)
        keep_alive_s = self._turns.keep_alive_s if self.has_comments else None
        ticker = KeepAlive(self._body, keep_alive_s) if keep_alive_s else None
        try:
            await race(receive, self._serve())
        except (RequestAbortedError, OSError):
            if not self._body.has_begun:
                raise
            # the client has disconnected
        finally:
            close_all(self._streams)
            self._body.close()
            if ticker is not None:
                ticker.stop()

    def _start(self) -> Message:
        return {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}

    async def _serve(self) -> None:
        self._first = self._events.first()
        for index, stream in enumerate(self._streams):
            stream.listen(partial(self._tell, index))
            self._tell(index)
        while self._num_open > 0 and self._error is None:
            await self._wakes.wait()
            self._wakes.clear()
            await self._body.held_up()
            if self._told and self._body.is_free:
                self._turns.add(self)
        await self._body.held_up()
        await self._body.end(self._last())

    def _tell(self, index: int) -> None:
        """Note that a stream has new output; join the next turn unless the body is held up."""
        if not self._told and self._body.is_free:
            self._turns.add(self)
        self._told.append(index)

    def convert(self) -> int:
        """Serialise the streams' new output, up to MAX_WORK; return the work done. Never raises."""
        work = 0
        if self._error is not None or not self._body.is_free:
            return work
        told, self._told = self._told, []
        try:
            for place, index in enumerate(told):
                if work >= MAX_WORK:
                    self._told = told[place:]
                    break
                if (delta := self._streams[index].take()) is not None:
                    if data := self._events.of(index, delta):
                        self._unsent.append(data)
                    self._num_open -= delta.finish_reason is not None
                    work += len(delta.token_ids) + work_of(delta)
        except Exception as error:
            self._error = error
        return work

    def send(self) -> None:
        """Send the serialised events; wake the task if deltas are left, or at the end. Never raises."""
        if self._unsent and self._error is None and self._num_open > 0 and self._body.is_free:
            try:
                self._body.write(self._take_unsent())
            except Exception as error:
                self._error = error
        if self._told or self._num_open == 0 or self._error is not None:
            self._wakes.set()

    def _last(self) -> bytes:
        """Return the last bytes of the stream. Raises the stream's error if a status can still be sent."""
        error = self._error
        if error is None:
            return self._take_unsent() + self._events.last() + self._events.done
        if not self._body.has_begun or isinstance(error, OSError):
            raise error
        if not isinstance(error, LlmError):
            logger.error("a stream failed", exc_info=error)
        access_of(self._request).error = answer_to(error).code
        return self._take_unsent() + self._events.failed(error) + self._events.done

    def _take_unsent(self) -> bytes:
        data = self._first + b"".join(self._unsent)
        self._first = b""
        self._unsent.clear()
        return data


async def race(receive: Receive, work: Awaitable[T]) -> T:
    """Do what `unless_disconnected` does, with ASGI's `receive` instead of a request."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise RequestAbortedError("the client closed the connection")
    finally:
        for unfinished in (task, watcher):
            unfinished.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


MAX_WORK = 10_000  # of a turn, tokens and what `work_of` counts: some 30 ms


class StreamTurns:
    """Converts and then sends all streams with new deltas, in one callback per step of the engine.

    Consecutive sends cost the kernel a fraction of the time of sends with other work in between: each of the
    latter wakes a sleeping receiver. If the event loop is late, the deltas of several steps are merged.

    A client that reads again after a pause may have many pending deltas. The work beyond MAX_WORK waits for
    the next turn, and other tasks run in between.

    A stream that has sent nothing for `keep_alive_s` sends a comment; with None, no stream does.
    """

    def __init__(self, keep_alive_s: float | None = None) -> None:
        self.keep_alive_s = keep_alive_s
        self._streams: list[EventStream] = []

    def add(self, stream: EventStream) -> None:
        """Include the stream in the next turn."""
        if not self._streams:
            asyncio.get_running_loop().call_soon(self._take_turn)
        self._streams.append(stream)

    def _take_turn(self) -> None:
        streams, self._streams = self._streams, []
        work = num_converted = 0
        while num_converted < len(streams) and work < MAX_WORK:
            work += streams[num_converted].convert()
            num_converted += 1
        for stream in streams[:num_converted]:
            stream.send()
        for stream in streams[num_converted:]:
            self.add(stream)


KEEP_ALIVE = b": keep-alive\n\n"  # a comment in server-sent events; clients skip it


class StreamedBody:
    """Sends pieces with ASGI's `send`; `start`, the message with the status, precedes the first piece.

    `write` runs `send` synchronously, until `send` waits. While the client reads, `send` never waits, so
    `write` may be called outside a task. Once `send` waits, the body is held up: `on_held_up` is called, and
    a task must await `held_up` before the next `write`.
    """

    def __init__(self, start: Message, send: Send, on_held_up: Callable[[], None]) -> None:
        self._start = start
        self._send = send
        self._on_held_up = on_held_up
        self._held_up: _Rest | None = None  # the remainder of a `send`
        self._clock = asyncio.get_running_loop().time
        self._has_ended = False
        self.has_begun = False  # whether the status was sent
        self.sent_s = self._clock()  # time of the last send

    @property
    def is_free(self) -> bool:
        """Whether a piece can be written now."""
        return self._held_up is None and not self._has_ended

    def write(self, data: bytes) -> None:
        """Send a piece. Callers must check `is_free` first."""
        assert self.is_free, "the piece before has not been sent"
        self.sent_s = self._clock()
        sending = self._send_piece(data, is_last=False)
        try:
            waits_for = sending.send(None)
        except StopIteration:
            return
        self._held_up = _Rest(sending, waits_for)
        self._on_held_up()

    async def held_up(self) -> None:
        """Wait until a held-up piece is sent."""
        if self._held_up is not None:
            await self._held_up
            self._held_up = None

    async def end(self, data: bytes) -> None:
        """Send the last piece."""
        self._has_ended = True
        await self._send_piece(data, is_last=True)

    def close(self) -> None:
        """Drop a held-up piece. Nothing can be sent afterwards."""
        self._has_ended = True
        if self._held_up is not None:
            self._held_up.close()

    async def _send_piece(self, data: bytes, *, is_last: bool) -> None:
        if not self.has_begun:
            self.has_begun = True
            await self._send(self._start)
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})


class KeepAlive:
    """Sends a comment whenever nothing was sent for `interval_s`, until `stop` is called."""

    def __init__(self, body: StreamedBody, interval_s: float) -> None:
        self._body = body
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(interval_s, self._tick)

    def stop(self) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        left_s = self._body.sent_s + self._interval_s - self._loop.time()
        if left_s <= 0:
            left_s = self._interval_s
            if self._body.is_free:
                self._body.write(KEEP_ALIVE)
        self._timer = self._loop.call_later(left_s, self._tick)


class _Rest:
    """The remainder of a coroutine that ran outside a task until it had to wait."""

    def __init__(self, coroutine: Coroutine[Any, None, None], waits_for: object) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, None, None]:
        yield self._waits_for
        yield from self._coroutine.__await__()

    def close(self) -> None:
        self._coroutine.close()
