"""uvicorn's HTTP with the bounds it lacks: on the time and the bytes in which a request arrives, and on
the time in which its answer is read."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import httptools
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

INVALID = "Invalid HTTP request received."
VERSIONS = ("1.0", "1.1")
MAX_HEAD_BYTES = 64 * 1024
MAX_AHEAD_BYTES = 64 * 1024  # of requests sent while another is under way
# A chunk of one byte takes six on the wire.
CHUNKING_FACTOR = 8
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """Closes connections that are silent or slow (slow loris), or whose header or trailer has no end.

    A client that leaves a full buffer of its answer unread is cut off, which aborts its request as any
    disconnect does. uvicorn itself bounds only the pause between two requests. `bounded` sets the bounds.

    Requests sent ahead (pipelined) are answered in order. uvicorn stops reading at the first of them, and
    then notices no client that leaves; here it reads on, and who sends more than MAX_AHEAD_BYTES or no
    HTTP is not listened to any more: the answer under way is the connection's last.
    """

    read_timeout_s: ClassVar[float]
    send_timeout_s: ClassVar[float]
    max_body_bytes: ClassVar[int]
    max_connections: ClassVar[int]
    refuse: ClassVar[ASGIApp]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None  # runs while the answer's buffer is full
        self._in_head = True
        self._num_bytes = 0  # of the request that is arriving
        self._num_ahead = 0  # bytes of requests that wait for the answer under way
        self._answering: RequestResponseCycle | None = None  # `cycle` is the last that arrived
        self._keeps_alive = True  # the client does, for the request that arrives
        self._is_deaf = False
        self._asks_upgrade = False  # in the head that has just arrived

    @property
    def _is_idle(self) -> bool:
        """No request is under way, though one may be arriving."""
        return self._answering is None or self._answering.response_complete

    @property
    def _is_busy(self) -> bool:
        """A request that has arrived whole is under way: what arrives now is sent ahead."""
        return not self._is_idle and self._answering is not None and not self._answering.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self.app = type(self).refuse  # for as long as the connection is there: who came first stays
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._forgive()
        super().connection_lost(exc)
        if self._answering is not None:  # uvicorn tells the last that arrived only
            self._answering.disconnected = not self._answering.response_complete
            self._answering.message_event.set()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._forgive()
        self._unread = self.loop.call_later(self.send_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forgive()

    def shutdown(self) -> None:
        if self._is_idle and self.transport.get_write_buffer_size() == 0:
            self.transport.abort()  # over TLS, `close` waits half a minute for the other side to say goodbye
        else:
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        self._num_bytes += len(data)
        self._num_ahead += len(data) if self._is_busy else 0
        self._unset_keepalive_if_required()  # uvicorn's clock of the pause
        self._parse(data)
        if self.transport.is_closing():
            return
        if self._deadline is None and self._is_idle:
            self._arm()  # an empty line begins no request
        if self._is_busy:
            self._read_ahead()
        else:
            self._check_size()

    def _parse(self, data: bytes) -> None:
        """As uvicorn's, which loses the body of a request that asks for an upgrade."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._asks_upgrade:  # CONNECT: what follows is not HTTP
                    self._go_deaf()
                    return
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self._asks_upgrade = False
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            except httptools.HttpParserError:
                self.logger.warning(INVALID)
                self.send_400_response(INVALID)
                return

    def _head_without_upgrade(self) -> bytes:
        """The head of the request that arrives, as of one that asks for none (RFC 9110, 7.8)."""
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
            self._go_deaf()
        elif not self._in_head and self.cycle.more_body and self.cycle.response_started:
            self.transport.close()  # the request has its answer, whatever the rest of its body is
        else:
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._num_bytes = True, 0
        self._arm()

    def on_headers_complete(self) -> None:
        if self.parser.get_http_version() not in VERSIONS:
            raise httptools.HttpParserError("only HTTP/1.0 and HTTP/1.1 are spoken here")
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._asks_upgrade = True  # the parser takes it to end here, so it is parsed again
            return
        super().on_headers_complete()
        self._in_head = False
        self._keeps_alive = self.cycle.keep_alive
        if self.expect_100_continue:
            self.cycle.keep_alive = False  # an answer without the body: will the client still send it?
        if not self.pipeline:
            self._answering = self.cycle

    def on_message_complete(self) -> None:
        if self._asks_upgrade:
            return
        self._disarm()
        if self.expect_100_continue:
            self.cycle.keep_alive = self._keeps_alive
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answering = self.pipeline[-1][0]  # uvicorn starts it now
        super().on_response_complete()
        if not self.pipeline:
            self._num_ahead = 0
        if self._in_head:
            self._unset_keepalive_if_required()  # the next request is arriving, against its own deadline

    def _read_ahead(self) -> None:
        if self._num_ahead > MAX_AHEAD_BYTES or len(self.cycle.body) > MAX_AHEAD_BYTES:
            self._go_deaf()
        self.flow.resume_reading()  # only who reads learns that the client has left

    def _go_deaf(self) -> None:
        """Drops what was sent ahead; the answer under way is the last."""
        assert self._answering is not None, "there is none under way"
        self._is_deaf = True
        self._disarm()
        self.pipeline.clear()
        self.cycle = self._answering
        self.cycle.keep_alive = False

    def _check_size(self) -> None:
        body_bytes = 0 if self._in_head else CHUNKING_FACTOR * self.max_body_bytes
        if self._num_bytes > MAX_HEAD_BYTES + body_bytes:
            if self._in_head:
                self.transport.write(TOO_LARGE)
            self.transport.close()

    def _arm(self) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(self.read_timeout_s, self._out_of_time)

    def _out_of_time(self) -> None:
        if self._is_busy:
            self._go_deaf()
        else:
            self.transport.abort()

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _forgive(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


def bounded(
    *,
    read_timeout_s: float,
    send_timeout_s: float,
    max_body_bytes: int,
    max_connections: int,
    refuse: ASGIApp,
) -> type[BoundedProtocol]:
    """The protocol with these bounds, for uvicorn to make its instances of.

    Requests on connections beyond `max_connections` go to the application `refuse`.
    """
    bounds = {
        "read_timeout_s": read_timeout_s,
        "send_timeout_s": send_timeout_s,
        "max_body_bytes": max_body_bytes,
        "max_connections": max_connections,
        "refuse": staticmethod(refuse),
    }
    return type("BoundedProtocol", (BoundedProtocol,), bounds)
