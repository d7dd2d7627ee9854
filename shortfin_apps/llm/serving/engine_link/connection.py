"""A connection between two of a server's processes; each notices immediately when the other ends.

The connection is a Unix-domain socket, for which the kernel reports that the peer has closed it. ZeroMQ would
reconnect, and does not notice that its peer has died. A message is sent as a frame: the length of the content
(4 bytes, little-endian), then the content as MessagePack.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Generic, TypeVar, cast

import msgspec

from shortfin_apps.llm.serving.engine_link.messages import Message, encode

LENGTH = struct.Struct("<I")

MessageT = TypeVar("MessageT")


class Connection(asyncio.Protocol, Generic[MessageT]):
    """One end of the connection, used by one event loop's thread.

    Messages passed to `send` before `open` are sent on opening. `on_lost` is called once, when either side
    has closed; nothing is sent afterwards. `is_held_up` is true while the other side does not read; messages
    are then buffered. `on_free` is called when the other side reads again.
    """

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[MessageT],
        on_message: Callable[[MessageT], None],
        *,
        on_lost: Callable[[], None],
        on_free: Callable[[], None] = lambda: None,
    ) -> None:
        self._decoder = decoder
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_free = on_free
        self._transport: asyncio.WriteTransport | None = None
        self._early: list[bytes] = []  # sent before there was a transport
        self._received = bytearray()
        self.is_held_up = False
        self.is_lost = False

    async def open(self, sock: socket.socket) -> None:
        """Take over the connected socket `sock`."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=sock)

    def send(self, message: Message) -> None:
        text = encode(message)
        frame = LENGTH.pack(len(text)) + text
        if self._transport is not None:
            self._transport.write(frame)
        elif not self.is_lost:
            self._early.append(frame)

    def close(self) -> None:
        """Send buffered messages and close. Closing twice is a no-op."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's class is not a subclass
        self._transport.write(b"".join(self._early))
        self._early.clear()

    def data_received(self, data: bytes) -> None:
        self._received += data
        begin = 0
        while (end := _end_of_frame(self._received, begin)) is not None:
            text = bytes(self._received[begin + LENGTH.size : end])
            begin = end
            self._on_message(self._decoder.decode(text))
        del self._received[:begin]

    def pause_writing(self) -> None:
        self.is_held_up = True

    def resume_writing(self) -> None:
        self.is_held_up = False
        self._on_free()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport, self.is_lost = None, True
        self._on_lost()


def exchange(sock: socket.socket, message: Message, decoder: msgspec.msgpack.Decoder[MessageT]) -> MessageT:
    """Send a message and return the next one received, without an event loop.

    Raises EOFError if the other side closes the connection.
    """
    text = encode(message)
    sock.sendall(LENGTH.pack(len(text)) + text)
    (length,) = LENGTH.unpack(_read(sock, LENGTH.size))
    return decoder.decode(_read(sock, length))


def _end_of_frame(received: bytearray, begin: int) -> int | None:
    """Return the end of the frame that begins at `begin`; None if the frame is incomplete."""
    text = begin + LENGTH.size
    if len(received) < text:
        return None
    (length,) = LENGTH.unpack_from(received, begin)
    return text + length if len(received) >= text + length else None


def _read(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (more := sock.recv(count - len(data))):
            raise EOFError("the other side has closed the connection")
        data += more
    return data
