"""TCP ports of a cluster: free ports for the router, and held ports for workers.

A held port is bound by the cluster's process and passed to the worker. If a worker bound its port itself, the
port would be free during a restart. Any local program could then bind the port and receive prompts and keys
from the router.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Container, Iterable
from typing import NamedTuple

from shortfin_apps.llm.serving.server.config import ServerConfigError

LOOPBACK = "127.0.0.1"


class Wanted(NamedTuple):
    """A port to bind on `host`; port 0 is any free one. Error messages name `flag`, which sets the port."""

    host: str
    port: int
    flag: str


def free_ports(wanted: Iterable[Wanted]) -> list[int]:
    """Return distinct ports, one per element of `wanted`. Raises ServerConfigError if a port is in use.

    The ports are not held: if another process binds one first, its intended user fails with an error.
    """
    with contextlib.ExitStack() as bound:
        sockets = [bound.enter_context(_bind(*each)) for each in wanted]
        return [sock.getsockname()[1] for sock in sockets]


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bind(host: str, port: int, flag: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ServerConfigError(
            f"cannot listen on {host}, port {port} ({reason}); stop the program that uses it or choose"
            f" another `{flag}`"
        ) from None


BACKLOG = 2048
RETRY_S = 1.0
RESET = struct.pack("ii", 1, 0)  # value of SO_LINGER with which `close` resets the connection
ACCEPTS, ACCEPTS_NO_MORE = b"+", b"-"


class HeldPort:
    """A port of `host` that is not in `taken`, bound until `close`, so that no other process can bind it.

    `fds` are passed to a worker: the listener, and a socket on which the worker reports when it starts and
    stops accepting connections (`HandedDown`). At other times this process refuses connections, so that the
    router tries another worker. Callers must use a HeldPort in one event loop only. Raises OSError.
    """

    def __init__(self, host: str, taken: Container[int] = ()) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = _listening(host, taken)
        try:
            self._reports, self._reporter = socket.socketpair()
        except OSError:
            self._listener.close()
            raise
        self._reports.setblocking(False)
        self._retry: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._reports, self._hear)
        self.refuse()

    @property
    def port(self) -> int:
        number: int = self._listener.getsockname()[1]
        return number

    @property
    def fds(self) -> tuple[int, int]:
        return self._listener.fileno(), self._reporter.fileno()

    def refuse(self) -> None:
        """Refuse connections until the next worker accepts them, as the last worker has ended. Idempotent."""
        with contextlib.suppress(BlockingIOError):
            while self._reports.recv(64):
                pass  # discard the ended worker's messages
        self._refuse()

    def close(self) -> None:
        self._accept()
        self._loop.remove_reader(self._reports)
        for each in (self._listener, self._reports, self._reporter):
            each.close()

    def _hear(self) -> None:
        if self._reports.recv(64).endswith(ACCEPTS):
            self._accept()
        else:
            self._refuse()

    def _accept(self) -> None:
        """Leave connections to the worker: stop accepting and resetting them in this process."""
        self._loop.remove_reader(self._listener)
        if self._retry is not None:
            self._retry.cancel()

    def _refuse(self) -> None:
        self._loop.add_reader(self._listener, self._refuse_one)

    def _refuse_one(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:  # out of file descriptors
            self._loop.remove_reader(self._listener)
            self._retry = self._loop.call_later(RETRY_S, self._refuse)
            return
        with connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


class HandedDown(socket.socket):
    """The listener in a worker. It tells the `HeldPort` when it starts and stops accepting connections."""

    def __init__(self, listener_fd: int, reporter_fd: int) -> None:
        super().__init__(fileno=listener_fd)
        self._reporter = socket.socket(fileno=reporter_fd)
        for each in (self, self._reporter):
            each.set_inheritable(False)  # child processes of the worker must not inherit the sockets

    def listen(self, backlog: int = BACKLOG) -> None:
        super().listen(backlog)
        self._report(ACCEPTS)

    def close(self) -> None:
        self._report(ACCEPTS_NO_MORE)
        self._reporter.close()
        super().close()

    def _report(self, what: bytes) -> None:
        with contextlib.suppress(OSError):  # the cluster's process has ended, and this worker will too
            self._reporter.send(what)


def _listening(host: str, taken: Container[int]) -> socket.socket:
    while True:
        listener = socket.create_server((host, 0), backlog=BACKLOG)
        if listener.getsockname()[1] not in taken:
            listener.setblocking(False)
            return listener
        listener.close()
