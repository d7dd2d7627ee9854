"""uvicorn's HTTP protocol with more limits.

The limits bound the time and size of an arriving request, and the time for which a client leaves an answer
unread.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import httptools
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

INVALID = "Invalid HTTP request received."
VERSIONS = ("1.0", "1.1")
MAX_HEADER_BYTES = 64 * 1024
MAX_PIPELINED_BYTES = 64 * 1024  # of requests sent before an earlier one is answered
# Maximum bytes on the wire per byte of a body: a one-byte chunk takes six.
CHUNKING_FACTOR = 8
LATE_S = 1.0  # a timer that fires later than this was delayed by a suspension (SIGSTOP, sleep)
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """Closes connections that are idle or slow (slow loris), or have an oversized header or trailer.

    A client that does not read its answer is disconnected after `send_timeout_s`, which aborts its request.
    uvicorn itself only limits the time between two requests. `bounded` makes a subclass with given limits.

    Pipelined requests are answered in order. uvicorn stops reading at the first pipelined request and then
    does not notice a disconnect; this class continues reading. After more than MAX_PIPELINED_BYTES, or
    invalid HTTP, further input is dropped and the connection is closed after the current answer.

    After a suspension of the process, every time limit restarts, because the process has not yet noticed what
    clients sent or read in the meantime.
    """

    read_timeout_s: ClassVar[float]
    send_timeout_s: ClassVar[float]
    max_body_bytes: ClassVar[int]
    max_connections: ClassVar[int]
    refuse: ClassVar[ASGIApp]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._read_deadline: asyncio.TimerHandle | None = None
        self._send_deadline: asyncio.TimerHandle | None = None  # set while the send buffer is full
        self._in_header = True
        self._num_bytes = 0  # of the arriving request
        self._num_pipelined_bytes = 0  # of requests after the one being answered
        self._answering: RequestResponseCycle | None = None  # uvicorn's `cycle`: the last request received
        self._keeps_alive = True  # whether the arriving request allows keep-alive
        self._drops_input = False
        self._asks_upgrade = False  # whether the header that has just arrived has `Upgrade`

    @property
    def _is_idle(self) -> bool:
        """Whether no request is being answered; a request may be arriving."""
        return self._answering is None or self._answering.response_complete

    @property
    def _is_busy(self) -> bool:
        """Whether a completely received request is being answered, so that further input is pipelined."""
        return not self._is_idle and self._answering is not None and not self._answering.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self.app = type(self).refuse  # for the life of the connection; earlier connections are kept
        self._start_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_read_timer()
        self._stop_send_timer()
        super().connection_lost(exc)
        if self._answering is not None:  # uvicorn only notifies the last request received
            self._answering.disconnected = not self._answering.response_complete
            self._answering.message_event.set()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_send_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_send_timer()

    def shutdown(self) -> None:
        if self._is_idle and self.transport.get_write_buffer_size() == 0:
            self.transport.abort()  # over TLS, `close` would wait 30 s for the peer's close_notify
        else:
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        if self._drops_input:
            return
        self._num_bytes += len(data)
        self._num_pipelined_bytes += len(data) if self._is_busy else 0
        self._unset_keepalive_if_required()  # uvicorn's timer between requests
        self._parse(data)
        if self.transport.is_closing():
            return
        if self._read_deadline is None and self._is_idle:
            self._start_read_timer()  # an empty line does not start a request
        if self._is_busy:
            self._keep_reading()
        else:
            self._check_size()

    def _parse(self, data: bytes) -> None:
        """Feed the parser. Unlike uvicorn's own loop, keep the body of a request with an `Upgrade`."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._asks_upgrade:  # CONNECT: the rest is not HTTP
                    self._drop_input()
                    return
                data = self._header_without_upgrade() + data[upgrade.args[0] :]
                self._asks_upgrade = False
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in uvicorn
            except httptools.HttpParserError:
                self.logger.warning(INVALID)
                self.send_400_response(INVALID)
                return

    def _header_without_upgrade(self) -> bytes:
        """Return the arriving request's header without its `Upgrade` (RFC 9110, 7.8)."""
        lines = [
            b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        ]
        for name, value in self.headers:
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                value = b", ".join(option for option in options if option.lower() != b"upgrade")
            if name != b"upgrade":
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])

    def send_400_response(self, msg: str) -> None:
        if self._is_busy:
            self._drop_input()
        elif not self._in_header and self.cycle.more_body and self.cycle.response_started:
            self.transport.close()  # already answered, so an invalid rest of the body does not matter
        else:
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_header, self._num_bytes = True, 0
        self._start_read_timer()

    def on_headers_complete(self) -> None:
        if self.parser.get_http_version() not in VERSIONS:
            raise httptools.HttpParserError("only HTTP/1.0 and HTTP/1.1 are supported")
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._asks_upgrade = True  # the parser ends the request here, so `_parse` parses it again
            return
        super().on_headers_complete()
        self._in_header = False
        self._keeps_alive = self.cycle.keep_alive
        if self.expect_100_continue:
            self.cycle.keep_alive = False  # if answered before the body, the client may or may not send it
        if not self.pipeline:
            self._answering = self.cycle

    def on_message_complete(self) -> None:
        if self._asks_upgrade:
            return
        self._stop_read_timer()
        if self.expect_100_continue:
            self.cycle.keep_alive = self._keeps_alive
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answering = self.pipeline[-1][0]  # the request that uvicorn answers next
        super().on_response_complete()
        if not self.pipeline:
            self._num_pipelined_bytes = 0
        if self._in_header:
            self._unset_keepalive_if_required()  # the next request is arriving, with its own deadline

    def _keep_reading(self) -> None:
        if self._num_pipelined_bytes > MAX_PIPELINED_BYTES or len(self.cycle.body) > MAX_PIPELINED_BYTES:
            self._drop_input()
        self.flow.resume_reading()  # a disconnect is only noticed while reading

    def _drop_input(self) -> None:
        """Drop pipelined requests and further input; close the connection after the current answer."""
        assert self._answering is not None, "no request is being answered"
        self._drops_input = True
        self._stop_read_timer()
        self.pipeline.clear()
        self.cycle = self._answering
        self.cycle.keep_alive = False

    def _check_size(self) -> None:
        body_bytes = 0 if self._in_header else CHUNKING_FACTOR * self.max_body_bytes
        if self._num_bytes > MAX_HEADER_BYTES + body_bytes:
            if self._in_header:
                self.transport.write(TOO_LARGE)
            self.transport.close()

    def _start_read_timer(self) -> None:
        self._stop_read_timer()
        self._read_deadline = self.loop.call_later(self.read_timeout_s, self._on_read_timeout)

    def _on_read_timeout(self) -> None:
        if self._is_late(self._read_deadline):
            self._start_read_timer()
        elif self._is_busy:
            self._drop_input()
        else:
            self.transport.abort()

    def _stop_read_timer(self) -> None:
        if self._read_deadline is not None:
            self._read_deadline.cancel()
            self._read_deadline = None

    def timeout_keep_alive_handler(self) -> None:
        if self._is_late(self.timeout_keep_alive_task):
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        else:
            super().timeout_keep_alive_handler()

    def _is_late(self, timer: asyncio.TimerHandle | None) -> bool:
        """Return whether a timer that fires now should have fired more than LATE_S ago."""
        return timer is not None and self.loop.time() - timer.when() > LATE_S

    def _start_send_timer(self) -> None:
        self._stop_send_timer()
        self._send_deadline = self.loop.call_later(self.send_timeout_s, self._on_send_timeout)

    def _on_send_timeout(self) -> None:
        if self._is_late(self._send_deadline):
            self._start_send_timer()
        else:
            self.transport.abort()

    def _stop_send_timer(self) -> None:
        if self._send_deadline is not None:
            self._send_deadline.cancel()
            self._send_deadline = None


def bounded(
    *,
    read_timeout_s: float,
    send_timeout_s: float,
    max_body_bytes: int,
    max_connections: int,
    refuse: ASGIApp,
) -> type[BoundedProtocol]:
    """Return a subclass of BoundedProtocol with these limits, for uvicorn's `http` setting.

    Requests on connections beyond `max_connections` are passed to the application `refuse`.
    """
    bounds = {
        "read_timeout_s": read_timeout_s,
        "send_timeout_s": send_timeout_s,
        "max_body_bytes": max_body_bytes,
        "max_connections": max_connections,
        "refuse": staticmethod(refuse),
    }
    return type("BoundedProtocol", (BoundedProtocol,), bounds)
