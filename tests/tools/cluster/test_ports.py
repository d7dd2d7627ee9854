from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator

import pytest

from shortfin_apps.llm.serving.server.config import ServerConfigError
from shortfin_apps.llm.tools.cluster import ports
from shortfin_apps.llm.tools.cluster.ports import LOOPBACK, HandedDown, HeldPort, Wanted, free_ports

ANY = Wanted(LOOPBACK, 0, "--port")


def test_zero_takes_ports_that_differ() -> None:
    ports = free_ports([ANY] * 20)
    assert len({*ports}) == 20
    assert min(ports) > 0


def test_a_port_in_use_names_the_flag() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerConfigError, match=rf"port {port} \(.* in use\).*`--metrics-port`"):
            free_ports([Wanted(LOOPBACK, port, "--metrics-port")])


def test_a_host_that_is_not_ours_is_one_sentence() -> None:
    with pytest.raises(ServerConfigError, match=r"cannot listen on no\.such\.host\.invalid, port 0"):
        free_ports([Wanted("no.such.host.invalid", 0, "--port")])


def test_a_given_port_is_kept_and_left_free() -> None:
    (port,) = free_ports([ANY])
    assert free_ports([Wanted(LOOPBACK, port, "--port")]) == [port]
    assert free_ports([Wanted(LOOPBACK, port, "--port")]) == [port]


pytestmark = pytest.mark.timeout(20)


@pytest.fixture
async def held() -> AsyncIterator[HeldPort]:
    port = HeldPort(LOOPBACK)
    yield port
    port.close()


def is_taken(port: int) -> bool:
    """Whether a neighbour cannot bind the port, by any address or option."""
    return all(
        _cannot_bind(host, port, options)
        for host in (LOOPBACK, "0.0.0.0")
        for options in ((), (socket.SO_REUSEADDR,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT))
    )


def _cannot_bind(host: str, port: int, options: tuple[int, ...]) -> bool:
    with socket.socket() as neighbour:
        for option in options:
            neighbour.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            neighbour.bind((host, port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


async def answers(port: int) -> bool:
    """Whether a request gets an answer; False where the connection is reset. Waits for either."""
    try:
        reader, writer = await asyncio.open_connection(LOOPBACK, port)
        writer.write(b"GET /ready HTTP/1.0\r\n\r\n")
        answer = await reader.read(1)
        writer.close()
        return answer != b""
    except ConnectionError:
        return False


async def until_refused(port: int) -> None:
    while await answers(port):
        await asyncio.sleep(0.01)


async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"!")
    writer.close()


def handed_down(held: HeldPort) -> HandedDown:
    """With descriptors of its own, as another process would have."""
    return HandedDown(*map(os.dup, held.fds))


async def test_connections_are_refused_unless_a_worker_accepts_them(held: HeldPort) -> None:
    assert is_taken(held.port)
    assert not await answers(held.port)
    for _ in range(2):
        listener = handed_down(held)
        assert not await answers(held.port), "it still starts"
        listener.listen()
        async with await asyncio.start_server(answer, sock=listener):
            assert await answers(held.port)
            assert is_taken(held.port)
        await until_refused(held.port)
    assert is_taken(held.port)


async def test_connections_are_refused_when_a_worker_ends_whatever_it_said(held: HeldPort) -> None:
    listener = handed_down(held)
    listener.listen()
    socket.socket.close(listener)  # killed: it says nothing
    listener._reporter.close()
    held.refuse()
    held.refuse()
    assert not await answers(held.port)


async def test_refusing_goes_on_when_descriptors_are_free_again(
    held: HeldPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "RETRY_S", 0.0)
    listener, failed = held._listener, []

    class Exhausted:
        def accept(self) -> None:
            failed.append(1)
            held._listener = listener
            raise OSError(errno.EMFILE, "too many open files")

        def fileno(self) -> int:
            return listener.fileno()

    port = held.port
    held._listener = Exhausted()  # type: ignore[assignment]
    assert not await answers(port)
    assert failed


async def test_a_port_that_no_socket_pair_is_left_for_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = socket.create_server((LOOPBACK, 0))
    monkeypatch.setattr(ports, "_listening", lambda *_: listener)
    monkeypatch.setattr(socket, "socketpair", no_descriptor)
    with pytest.raises(OSError, match="open files"):
        HeldPort(LOOPBACK)
    assert listener.fileno() == -1


def no_descriptor() -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
