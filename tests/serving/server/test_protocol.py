from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, cast

import orjson
import pytest

from shortfin_apps.llm.serving.server import http_server
from shortfin_apps.llm.serving.server.protocol import MAX_HEADER_BYTES, BoundedProtocol
from tests.serving.api.harness import TOKENIZER
from tests.serving.api.loopback import TIMEOUT_S, Loopback, ready_server
from tests.serving.api.scripted_engine import forever

pytestmark = pytest.mark.timeout(60)

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

READ_TIMEOUT_S = 0.05
GET_HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
HEALTHY = b'{"status":"healthy"}'
SLOW = {
    "nothing": b"",
    "half a line": b"POST /gene",
    "half a header": b"POST /generate HTTP/1.1\r\nHost: a\r\nX-A: ",
    "half a body": b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{",
    "half a chunk": b"POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
    "half a body that is refused": b"POST /nowhere HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{",
}


async def exchange(server: Loopback, pieces: Iterator[bytes]) -> bytes:
    """Sends `pieces`; returns the server's output until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)

    async def send() -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()

    sending = asyncio.create_task(send())
    output = b""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while data := await reader.read(65536):
                output += data
    except ConnectionError:
        pass  # it was closed while we were still sending
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    return output


@pytest.mark.parametrize("request_", SLOW.values(), ids=SLOW.keys())
async def test_a_slow_request_is_disconnected(request_: bytes) -> None:
    async with ready_server(read_timeout=READ_TIMEOUT_S) as server:
        await exchange(server, iter([request_]))  # returns only if the server disconnects
        assert (await server.client.post("/generate", json={"text": "a"})).status_code == 200


KEPT_OPEN = {
    "an empty line": [b"\r\n"],
    "several empty lines": [b"\r\n"] * 3,
    "half an empty line": [b"\r"],
}


@asynccontextmanager
async def connection(server: Loopback) -> AsyncIterator[Connection]:
    """A new connection, for at most TIMEOUT_S."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield reader, writer
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


@pytest.mark.parametrize("pieces", KEPT_OPEN.values(), ids=KEPT_OPEN.keys())
async def test_empty_lines_do_not_keep_a_connection_open(pieces: list[bytes]) -> None:
    async with ready_server(read_timeout=READ_TIMEOUT_S) as server, connection(server) as (reader, writer):
        writer.write(GET_HEALTH)
        await reader.readuntil(HEALTHY)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        with suppress(ConnectionResetError):
            assert await reader.read() == b""  # returns only if the server disconnects


async def test_an_empty_line_between_requests_is_accepted() -> None:
    """Some clients send one after a body; RFC 9112 (2.2) allows it."""
    async with ready_server() as server, connection(server) as (reader, writer):
        for _ in range(2):
            writer.write(GET_HEALTH)
            await reader.readuntil(HEALTHY)
            writer.write(b"\r\n")


def endless(first: bytes, again: bytes) -> Iterator[bytes]:
    yield first
    while True:
        yield again


ENDLESS = {
    "path": (b"GET /", b"a" * 1000),
    "header": (b"GET / HTTP/1.1\r\nX-A: ", b"a" * 1000),
    "headers": (b"GET / HTTP/1.1\r\n", b"X-A: a\r\n" * 100),
    "trailer": (
        b"POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX-A: ",
        b"a" * 1000,
    ),
}


@pytest.mark.parametrize(("first", "again"), ENDLESS.values(), ids=ENDLESS.keys())
async def test_an_endless_request_is_disconnected(first: bytes, again: bytes) -> None:
    async with ready_server(max_body_bytes=1000) as server:
        output = await exchange(server, endless(first, again))
        assert output == b"" or output.split()[1] in (b"431", b"400")
        assert (await server.client.post("/generate", json={"text": "a"})).status_code == 200


async def test_a_long_header_is_accepted() -> None:
    async with ready_server() as server:
        headers = {"x-a": "a" * (MAX_HEADER_BYTES // 2)}
        for _ in range(3):  # on one connection: the size is per request
            assert (await server.client.get("/health", headers=headers)).status_code == 200


async def test_a_slow_answer_does_not_time_out() -> None:
    async with ready_server(read_timeout=READ_TIMEOUT_S) as server:
        server.engine.gate.clear()
        answer = asyncio.create_task(server.client.post("/generate", json={"text": "a"}))
        await server.engine.waiting.wait()
        await exchange(server, iter([b""]))  # takes READ_TIMEOUT_S
        server.engine.gate.set()
        assert (await answer).status_code == 200


def post_generate(body: bytes = b'{"text": "a"}', extra: bytes = b"") -> bytes:
    head = b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n" + extra
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


PIPELINED = {
    "a request": GET_HEALTH,
    "several": GET_HEALTH * 100,
    "half a header": GET_HEALTH[:20],
    "half a body": post_generate()[:-1],
    "a generation": post_generate(),
    "a large body": post_generate(b"a" * 500_000),
    "invalid HTTP": b"?" * 1000,
    "many empty lines": b"\r\n" * 300_000,
}


@pytest.mark.parametrize("pipelined", PIPELINED.values(), ids=PIPELINED.keys())
@pytest.mark.parametrize("stream", [b"true", b"false"])
async def test_a_disconnect_after_pipelined_requests_is_noticed(pipelined: bytes, stream: bytes) -> None:
    async with ready_server(forever(TOKENIZER, "the ")) as server:
        server.engine.gate.clear()
        async with connection(server) as (_, writer):
            writer.write(post_generate(b'{"text": ["a", "b"], "stream": ' + stream + b"}"))
            await server.engine.waiting.wait()
            writer.write(pipelined)
            with suppress(ConnectionError):  # it may stop reading
                await writer.drain()
        async with asyncio.timeout(TIMEOUT_S):
            while server.engine.live:
                server.engine.freed.clear()
                await server.engine.freed.wait()
        assert len(server.engine.aborted) == 2


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with ready_server() as server:
        server.engine.gate.clear()
        async with connection(server) as (reader, writer):
            writer.write(post_generate() + GET_HEALTH + b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n")
            await server.engine.waiting.wait()
            server.engine.gate.set()
            for expected in (b"the end", HEALTHY, b"tokenizers"):
                await reader.readuntil(expected)


@pytest.mark.parametrize("pipelined", [PIPELINED["a large body"], PIPELINED["invalid HTTP"]])
async def test_invalid_pipelined_input_does_not_affect_the_current_answer(pipelined: bytes) -> None:
    async with ready_server() as server:
        server.engine.gate.clear()
        async with connection(server) as (reader, writer):
            writer.write(post_generate())
            await server.engine.waiting.wait()
            writer.write(pipelined)
            await writer.drain()
            await server.client.get("/health")  # on another connection: so that the server has read ours
            server.engine.gate.set()
            output = await reader.read()
        assert output.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"connection: close\r\n" in output
        assert output.count(b"HTTP/1.1") == 1


VERSIONS = {
    "HTTP/0.9 without a version": (b"GET /health\r\n\r\n", b"400"),
    "HTTP/0.9": (b"GET /health HTTP/0.9\r\n\r\n", b"400"),
    "HTTP/2.0": (b"GET /health HTTP/2.0\r\nHost: a\r\n\r\n", b"400"),
    "HTTP/1.0": (b"GET /health HTTP/1.0\r\n\r\n", b"200"),
    "HTTP/1.1": (b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", b"200"),
}


@pytest.mark.parametrize(("request_", "status"), VERSIONS.values(), ids=VERSIONS.keys())
async def test_only_http_1_is_supported(request_: bytes, status: bytes) -> None:
    async with ready_server() as server:
        output = await exchange(server, iter([request_]))
        assert output.startswith(b"HTTP/1.1 " + status)
        assert output.count(b"HTTP/1.1 ") == 1
        assert (HEALTHY in output) is (status == b"200")


async def test_a_pipelined_request_of_another_version_is_not_answered() -> None:
    async with ready_server() as server:
        output = await exchange(server, iter([GET_HEALTH + b"GET /health HTTP/0.9\r\n\r\n"]))
        assert output.count(HEALTHY) == 1


UPGRADES = {
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
    "websocket": b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
}


@pytest.mark.parametrize("upgrade", UPGRADES.values(), ids=UPGRADES.keys())
async def test_an_upgrade_is_ignored_and_the_body_is_kept(
    upgrade: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Java's HttpClient requests h2c with its first request, even a POST."""
    async with ready_server() as server:
        chunked = post_generate(b"", upgrade).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        chunks = [b'7\r\n{"text"\r\n', b'6\r\n: "a"}\r\n0\r\n\r\n']
        async with connection(server) as (reader, writer):
            for pieces in (
                [post_generate(extra=upgrade)],
                [chunked, *chunks],
                [post_generate(extra=upgrade)],
            ):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await server.client.get(
                        "/health"
                    )  # on another connection: so that the server has read ours
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
                await reader.readuntil(b"the end")
                await reader.readuntil(b"}]}]}")
            writer.write(GET_HEALTH.replace(b"Host: a\r\n", b"Host: a\r\n" + upgrade) + GET_HEALTH)
            await reader.readuntil(HEALTHY)
            await reader.readuntil(HEALTHY)
    assert "upgrade" not in caplog.text.lower()


@pytest.mark.parametrize("target", [b"a:80", b"/health"])
async def test_connect_is_refused(target: bytes) -> None:
    async with ready_server() as server:
        for rest in (b"", GET_HEALTH, b"?" * 100):
            connect = b"CONNECT " + target + b" HTTP/1.1\r\nHost: a\r\n\r\n"
            output = await exchange(server, iter([connect + rest]))
            assert output.split()[1] in (b"400", b"405")
            assert output.count(b"HTTP/1.1") == 1


async def until_all_disconnected(server: Loopback) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while server.server.server_state.connections:
            await asyncio.sleep(0)


@pytest.mark.parametrize("limit", [1, 3])
async def test_only_connections_beyond_the_limit_are_refused(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", limit)
    async with ready_server() as server:
        await server.client.aclose()
        await until_all_disconnected(server)
        async with AsyncExitStack() as stack:
            within = [await stack.enter_async_context(connection(server)) for _ in range(limit)]
            for reader, writer in within:  # so that the server has accepted them all
                writer.write(GET_HEALTH)
                await reader.readuntil(HEALTHY)
            output = await exchange(server, iter([post_generate()]))
            head, _, body = output.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert {b"retry-after: 5", b"connection: close"} <= set(head.lower().split(b"\r\n"))
            assert f"its {limit} connections" in orjson.loads(body)["error"]
            for reader, writer in within:  # earlier connections are still served
                writer.write(GET_HEALTH)
                await reader.readuntil(HEALTHY)
        await until_all_disconnected(server)
        async with connection(server) as (reader, writer):
            writer.write(GET_HEALTH)
            await reader.readuntil(HEALTHY)


async def test_a_connection_is_kept_after_head() -> None:
    async with ready_server() as server, connection(server) as (reader, writer):
        writer.write(b"HEAD /health HTTP/1.1\r\nHost: a\r\n\r\n" + GET_HEALTH)
        assert b" 200 OK" in await reader.readuntil(b"\r\n\r\n")
        assert b" 200 OK" in await reader.readuntil(b"\r\n\r\n")  # without a body between
        await reader.readuntil(HEALTHY)


EXPECT = b"Expect: 100-continue\r\n"


@pytest.mark.parametrize("path", [b"/nowhere", b"/generate"])
async def test_a_body_after_an_early_answer_is_not_read_as_a_request(path: bytes) -> None:
    """Nor is the next request read as the body: the client may or may not still send it."""
    async with ready_server(max_body_bytes=10) as server:
        head = post_generate(b"a" * 20, EXPECT).replace(b"/generate", path)[:-20]
        async with connection(server) as (reader, writer):
            writer.write(head)
            output = await reader.read()
        assert b"\r\nconnection: close\r\n" in output
        assert output.count(b"HTTP/1.1 ") == 1


async def test_a_connection_is_kept_after_100_continue() -> None:
    async with ready_server() as server:
        request = post_generate(extra=EXPECT)
        async with connection(server) as (reader, writer):
            for _ in range(2):
                writer.write(request[:-13])
                assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
                writer.write(request[-13:])
                assert b"connection: close" not in await reader.readuntil(b"\r\n\r\n")
                await reader.readuntil(b"}]}]}")
            writer.write(GET_HEALTH.replace(b"Host: a\r\n", b"Host: a\r\n" + EXPECT) * 2)
            await reader.readuntil(HEALTHY)
            await reader.readuntil(HEALTHY)


class LateLoop:
    """The loop of a process that was suspended for `late_s`: its timers are called back that much later."""

    def __init__(self, late_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.late_s = late_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def time(self) -> float:
        return self._loop.time() + self.late_s


async def until_connected(server: Loopback) -> BoundedProtocol:
    async with asyncio.timeout(TIMEOUT_S):
        while not (connections := server.server.server_state.connections):
            await asyncio.sleep(0)
    [protocol] = connections
    assert isinstance(protocol, BoundedProtocol)
    return protocol


@pytest.mark.parametrize("timer", ["read", "send", "keep-alive"])
async def test_a_suspension_of_the_server_is_not_blamed_on_the_client(
    timer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "SEND_TIMEOUT_S", 100)
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 100)
    async with ready_server(read_timeout=100) as server:
        await server.client.aclose()
        while server.server.server_state.connections:
            await asyncio.sleep(0)
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        protocol = await until_connected(server)
        call_back = {
            "read": protocol._on_read_timeout,
            "send": protocol._on_send_timeout,
            "keep-alive": protocol.timeout_keep_alive_handler,
        }[timer]
        if timer == "send":
            protocol.pause_writing()
        if timer == "keep-alive":
            writer.write(GET_HEALTH)
            while protocol.timeout_keep_alive_task is None:
                await asyncio.sleep(0)
        loop = protocol.loop = cast(asyncio.AbstractEventLoop, LateLoop(100 + 3600))
        call_back()
        assert not protocol.transport.is_closing()
        cast(LateLoop, loop).late_s = 100
        call_back()
        assert protocol.transport.is_closing()
        writer.close()
