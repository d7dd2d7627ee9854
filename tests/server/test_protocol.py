from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import orjson
import pytest

from shortfin_apps.llm.server.protocol import MAX_HEADER_BYTES
from tests.api.harness import TOKENIZER
from tests.api.loopback import TIMEOUT_S, Loopback, loopback
from tests.api.scripted_engine import forever

pytestmark = pytest.mark.timeout(60)

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

HASTE_S = 0.05
GET_HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
HEALTHY = b'{"status":"healthy"}'
SLOW = {
    "silence": b"",
    "half a line": b"POST /gene",
    "half a header": b"POST /generate HTTP/1.1\r\nHost: a\r\nX-A: ",
    "half a body": b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{",
    "half a chunk": b"POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
    "half a body that is refused": b"POST /nowhere HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{",
}


async def exchange(server: Loopback, pieces: Iterator[bytes]) -> bytes:
    """All that the server says to these bytes until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)

    async def send() -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()

    sending = asyncio.create_task(send())
    said = b""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while data := await reader.read(65536):
                said += data
    except ConnectionError:
        pass  # it was closed while we were still talking
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    return said


@pytest.mark.parametrize("request_", SLOW.values(), ids=SLOW.keys())
async def test_a_request_that_does_not_end_in_time_is_closed(request_: bytes) -> None:
    async with loopback(read_timeout=HASTE_S) as server:
        await server.until_ready()
        await exchange(server, iter([request_]))  # returns only if the server hangs up
        assert (await server.client.post("/generate", json={"text": "a"})).status_code == 200


KEPT_OPEN = {
    "an empty line": [b"\r\n"],
    "empty lines, now and then": [b"\r\n"] * 3,
    "half an empty line": [b"\r"],
}


@asynccontextmanager
async def connection(server: Loopback) -> AsyncIterator[Connection]:
    """A connection of its own, for at most TIMEOUT_S."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield reader, writer
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


@pytest.mark.parametrize("pieces", KEPT_OPEN.values(), ids=KEPT_OPEN.keys())
async def test_bytes_between_requests_keep_no_connection_open(pieces: list[bytes]) -> None:
    async with loopback(read_timeout=HASTE_S) as server:
        await server.until_ready()
        async with connection(server) as (reader, writer):
            writer.write(GET_HEALTH)
            await reader.readuntil(HEALTHY)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            with suppress(ConnectionResetError):
                assert await reader.read() == b""  # returns only if the server hangs up


async def test_an_empty_line_between_requests_is_no_fault() -> None:
    """Some clients end a body with one; RFC 9112 (2.2) lets it pass."""
    async with loopback() as server:
        await server.until_ready()
        async with connection(server) as (reader, writer):
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
async def test_a_request_without_end_is_cut_off(first: bytes, again: bytes) -> None:
    async with loopback(max_body_bytes=1000) as server:
        await server.until_ready()
        said = await exchange(server, endless(first, again))
        assert said == b"" or said.split()[1] in (b"431", b"400")
        assert (await server.client.post("/generate", json={"text": "a"})).status_code == 200


async def test_a_long_header_is_fine() -> None:
    async with loopback() as server:
        await server.until_ready()
        headers = {"x-a": "a" * (MAX_HEADER_BYTES // 2)}
        for _ in range(3):  # on one connection: the count begins anew
            assert (await server.client.get("/health", headers=headers)).status_code == 200


async def test_a_slow_answer_is_not_a_slow_request() -> None:
    async with loopback(read_timeout=HASTE_S) as server:
        await server.until_ready()
        server.engine.gate.clear()
        asked = asyncio.create_task(server.client.post("/generate", json={"text": "a"}))
        await server.engine.waiting.wait()
        await exchange(server, iter([b""]))  # as long as a slow request would have had
        server.engine.gate.set()
        assert (await asked).status_code == 200


def post_generate(body: bytes = b'{"text": "a"}', extra: bytes = b"") -> bytes:
    head = b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n" + extra
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


AHEAD = {
    "a request": GET_HEALTH,
    "several": GET_HEALTH * 100,
    "half a header": GET_HEALTH[:20],
    "half a body": post_generate()[:-1],
    "a generation": post_generate(),
    "a large body": post_generate(b"a" * 500_000),
    "no HTTP at all": b"?" * 1000,
    "empty lines without end": b"\r\n" * 300_000,
}


@pytest.mark.parametrize("ahead", AHEAD.values(), ids=AHEAD.keys())
@pytest.mark.parametrize("stream", [b"true", b"false"])
async def test_a_client_that_sends_ahead_and_leaves_is_noticed(ahead: bytes, stream: bytes) -> None:
    async with loopback(forever(TOKENIZER, "the ")) as server:
        await server.until_ready()
        server.engine.gate.clear()
        async with connection(server) as (_, writer):
            writer.write(post_generate(b'{"text": ["a", "b"], "stream": ' + stream + b"}"))
            await server.engine.waiting.wait()
            writer.write(ahead)
            with suppress(ConnectionError):  # it need not take all of that
                await writer.drain()
        async with asyncio.timeout(TIMEOUT_S):
            while server.engine.live:
                server.engine.freed.clear()
                await server.engine.freed.wait()
        assert len(server.engine.aborted) == 2


async def test_what_is_sent_ahead_is_answered_in_order() -> None:
    async with loopback() as server:
        await server.until_ready()
        server.engine.gate.clear()
        async with connection(server) as (reader, writer):
            writer.write(post_generate() + GET_HEALTH + b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n")
            await server.engine.waiting.wait()
            server.engine.gate.set()
            for expected in (b"the end", HEALTHY, b"tokenizers"):
                await reader.readuntil(expected)


@pytest.mark.parametrize("ahead", [AHEAD["a large body"], AHEAD["no HTTP at all"]])
async def test_what_cannot_be_sent_ahead_costs_no_answer_that_is_under_way(ahead: bytes) -> None:
    async with loopback() as server:
        await server.until_ready()
        server.engine.gate.clear()
        async with connection(server) as (reader, writer):
            writer.write(post_generate())
            await server.engine.waiting.wait()
            writer.write(ahead)
            await writer.drain()
            await server.client.get("/health")  # on another connection: the server has read ours
            server.engine.gate.set()
            said = await reader.read()
        assert said.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"connection: close\r\n" in said
        assert said.count(b"HTTP/1.1") == 1


VERSIONS = {
    "HTTP/0.9, as it was written": (b"GET /health\r\n\r\n", b"400"),
    "HTTP/0.9": (b"GET /health HTTP/0.9\r\n\r\n", b"400"),
    "HTTP/2.0": (b"GET /health HTTP/2.0\r\nHost: a\r\n\r\n", b"400"),
    "HTTP/1.0": (b"GET /health HTTP/1.0\r\n\r\n", b"200"),
    "HTTP/1.1": (b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", b"200"),
}


@pytest.mark.parametrize(("request_", "status"), VERSIONS.values(), ids=VERSIONS.keys())
async def test_only_http_1_is_spoken(request_: bytes, status: bytes) -> None:
    async with loopback() as server:
        await server.until_ready()
        said = await exchange(server, iter([request_]))
        assert said.startswith(b"HTTP/1.1 " + status)
        assert said.count(b"HTTP/1.1 ") == 1
        assert (HEALTHY in said) is (status == b"200")


async def test_a_request_of_another_version_behind_one_is_not_answered() -> None:
    async with loopback() as server:
        await server.until_ready()
        said = await exchange(server, iter([GET_HEALTH + b"GET /health HTTP/0.9\r\n\r\n"]))
        assert said.count(HEALTHY) == 1


UPGRADES = {
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
    "websocket": b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
}


@pytest.mark.parametrize("upgrade", UPGRADES.values(), ids=UPGRADES.keys())
async def test_an_upgrade_that_is_asked_for_is_ignored_and_costs_no_body(
    upgrade: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Java's HttpClient asks for h2c with its first request, whatever that is."""
    async with loopback() as server:
        await server.until_ready()
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
                    await server.client.get("/health")  # on another connection: the server has read ours
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
                await reader.readuntil(b"the end")
                await reader.readuntil(b"}]}]}")
            writer.write(GET_HEALTH.replace(b"Host: a\r\n", b"Host: a\r\n" + upgrade) + GET_HEALTH)
            await reader.readuntil(HEALTHY)
            await reader.readuntil(HEALTHY)
    assert "upgrade" not in caplog.text.lower()


@pytest.mark.parametrize("target", [b"a:80", b"/health"])
async def test_a_tunnel_is_refused(target: bytes) -> None:
    async with loopback() as server:
        await server.until_ready()
        for behind in (b"", GET_HEALTH, b"?" * 100):
            connect = b"CONNECT " + target + b" HTTP/1.1\r\nHost: a\r\n\r\n"
            said = await exchange(server, iter([connect + behind]))
            assert said.split()[1] in (b"400", b"405")
            assert said.count(b"HTTP/1.1") == 1


async def until_nobody_is_connected(server: Loopback) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while server.server.server_state.connections:
            await asyncio.sleep(0)


@pytest.mark.parametrize("limit", [1, 3])
async def test_only_connections_beyond_the_limit_are_refused(limit: int) -> None:
    async with loopback(limit_concurrency=limit) as server:
        await server.until_ready()
        await server.client.aclose()
        await until_nobody_is_connected(server)
        async with AsyncExitStack() as stack:
            within = [await stack.enter_async_context(connection(server)) for _ in range(limit)]
            for reader, writer in within:  # by now the server has accepted them all
                writer.write(GET_HEALTH)
                await reader.readuntil(HEALTHY)
            said = await exchange(server, iter([post_generate()]))
            head, _, body = said.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert {b"retry-after: 5", b"connection: close"} <= set(head.lower().split(b"\r\n"))
            assert "--limit-concurrency" in orjson.loads(body)["error"]
            for reader, writer in within:  # who was here first is served as before
                writer.write(GET_HEALTH)
                await reader.readuntil(HEALTHY)
        await until_nobody_is_connected(server)
        async with connection(server) as (reader, writer):
            writer.write(GET_HEALTH)
            await reader.readuntil(HEALTHY)


async def test_a_connection_goes_on_after_head() -> None:
    async with loopback() as server:
        await server.until_ready()
        async with connection(server) as (reader, writer):
            writer.write(b"HEAD /health HTTP/1.1\r\nHost: a\r\n\r\n" + GET_HEALTH)
            assert b" 200 OK" in await reader.readuntil(b"\r\n\r\n")
            assert b" 200 OK" in await reader.readuntil(b"\r\n\r\n")  # nothing stands between
            await reader.readuntil(HEALTHY)


EXPECT = b"Expect: 100-continue\r\n"


@pytest.mark.parametrize("path", [b"/nowhere", b"/generate"])
async def test_a_body_that_was_not_asked_for_is_not_read_as_the_next_request(path: bytes) -> None:
    """Nor the next request as the body: whether a client still sends it cannot be known."""
    async with loopback(max_body_bytes=10) as server:
        await server.until_ready()
        head = post_generate(b"a" * 20, EXPECT).replace(b"/generate", path)[:-20]
        async with connection(server) as (reader, writer):
            writer.write(head)
            said = await reader.read()
        assert b"\r\nconnection: close\r\n" in said
        assert said.count(b"HTTP/1.1 ") == 1


async def test_a_connection_goes_on_after_a_body_that_was_asked_for() -> None:
    async with loopback() as server:
        await server.until_ready()
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
