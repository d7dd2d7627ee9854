from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from shortfin_apps.llm.components.request.messages import FinishReason
from shortfin_apps.llm.contract.errors import ConstraintError, InvocationError, LlmError, UnavailableError
from shortfin_apps.llm.serving.api.page.feed import Reader
from shortfin_apps.llm.serving.frontend.async_engine import AsyncEngine
from shortfin_apps.llm.serving.frontend.metrics import ServerMetrics
from shortfin_apps.llm.serving.frontend.text_generation import TextGenerator
from shortfin_apps.llm.serving.frontend.text_stream import TextDelta
from shortfin_apps.llm.serving.frontend.text_workers import SHORT_PLACES
from shortfin_apps.llm.serving.http.streaming import MAX_WORK, EventStream, StreamTurns, json_line
from shortfin_apps.llm.serving.server import http_server
from shortfin_apps.llm.serving.server.model_loading import Loaded
from shortfin_apps.llm.serving.server.protocol import BoundedProtocol
from shortfin_apps.llm.serving.text.tokenizer import LONG_TEXT
from tests.components.engine_fixture import Rig, make_rig
from tests.components.fake_device import fake_config
from tests.serving.api.harness import MESSAGES, TOKENIZER, Harness, events_of
from tests.serving.api.loopback import TIMEOUT_S, Loopback, ready_server
from tests.serving.api.scripted_engine import failing, forever, saying

PATHS = ["/generate", "/v1/completions", "/v1/chat/completions"]
BODIES = {
    "/generate": b'{"text": ["a", "b"], "stream": %s}',
    "/v1/completions": b'{"prompt": ["a", "b"], "max_tokens": 9, "stream": %s}',
    "/v1/chat/completions": b'{"messages": [{"role": "user", "content": "a"}], "n": 2, "stream": %s}',
}


async def all_freed(server: Loopback) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while server.engine.live:
            await server.engine.freed.wait()
            server.engine.freed.clear()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [b"false", b"true"])
async def test_a_disconnect_while_waiting_aborts_all_sequences(path: str, stream: bytes) -> None:
    async with ready_server(forever(TOKENIZER, "the ")) as server:
        server.engine.gate.clear()
        writer = await server.send_raw(path, BODIES[path] % stream)
        await asyncio.wait_for(server.engine.waiting.wait(), TIMEOUT_S)
        assert len(server.engine.live) == 2
        writer.close()
        await all_freed(server)
        assert len(server.engine.aborted) == 2


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/generate", {"text": "a" * LONG_TEXT}),
        ("/v1/completions", {"prompt": "a" * LONG_TEXT}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}),
        ("/v1/messages/count_tokens", {"messages": MESSAGES}),
        ("/tokenize", {"messages": MESSAGES}),
        ("/tokenize", {"prompt": "a" * LONG_TEXT}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
@pytest.mark.timeout(60)
async def test_a_text_waits_for_no_thread_once_its_client_has_disconnected(
    path: str, fields: dict[str, object]
) -> None:
    """Or a client's abandoned requests would delay its next one."""
    generators: list[TextGenerator] = []
    gate, begun = threading.Event(), threading.Event()

    def load(loaded: Loaded) -> Loaded:
        generators.append(loaded.model.generator)
        loaded.model.generator.max_seq_len = 2 * LONG_TEXT
        return loaded

    def hold() -> None:
        begun.set()
        gate.wait(TIMEOUT_S)

    async with ready_server(load=load) as server:
        workers = generators[0].workers
        waiting = workers._short.turns._waiting
        held = [asyncio.create_task(workers.run(1, hold)) for _ in range(SHORT_PLACES // 2)]
        try:
            async with asyncio.timeout(TIMEOUT_S):
                assert await asyncio.to_thread(begun.wait, TIMEOUT_S)
                writer = await server.send_raw(path, json.dumps(fields).encode())
                while not waiting:
                    await asyncio.sleep(0)
                writer.close()
                while waiting:
                    await asyncio.sleep(0)
                assert not any(task.done() for task in held)
        finally:
            gate.set()
            await asyncio.gather(*held)
        assert (await server.client.post(path, json=fields)).status_code == 200
        assert len(server.engine.calls) <= 1


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_a_disconnect_during_a_stream_aborts_all_sequences(
    path: str, fields: dict[str, object]
) -> None:
    async with ready_server(forever(TOKENIZER, "the ")) as server:
        body = {**fields, "max_tokens": 50, "stream": True}
        async with server.client.stream("POST", path, json=body) as response:
            async for _ in response.aiter_lines():
                server.engine.gate.clear()
                break
        await all_freed(server)


@pytest.mark.parametrize("path", PATHS)
async def test_the_status_is_sent_with_the_first_token(path: str) -> None:
    async with ready_server(forever(TOKENIZER, "the ")) as server:
        server.engine.gate.clear()
        reader, writer = await server.open_raw(path, BODIES[path] % b"true")
        await asyncio.wait_for(server.engine.waiting.wait(), TIMEOUT_S)
        reading = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
        await server.client.get("/health")  # what the server had to send has arrived by now
        assert not reading.done()
        server.engine.gate.set()
        head = await asyncio.wait_for(reading, TIMEOUT_S)
        assert head.startswith(b"HTTP/1.1 200 ")
        for line in (b"x-accel-buffering: no", b"cache-control: no-cache", b"x-request-id: "):
            assert line in head.lower()
        assert b"keep-alive" not in await asyncio.wait_for(reader.readuntil(b"[DONE]"), TIMEOUT_S)
        writer.close()


async def test_chunks_are_sent_as_they_are_generated() -> None:
    async with ready_server(forever(TOKENIZER, "the ")) as server:
        body = {"text": "a", "stream": True}
        async with server.client.stream("POST", "/generate", json=body) as response:
            lines = [line async for line in response.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert len(lines) == 51


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvocationError("x"), 500, "INVOCATION_FAILED"),
        (ConstraintError("x", "regex"), 400, "INVALID_REQUEST_ARGS"),
        (UnavailableError("x"), 503, "UNAVAILABLE"),
    ],
)
async def test_an_error_before_the_first_token_is_a_status(
    path: str, error: LlmError, status: int, code: str
) -> None:
    harness = Harness(failing(error))
    answer = await harness.client.post(
        path,
        content=BODIES[path] % b"true",
        headers={"X-Request-Id": "r1", "Content-Type": "application/json"},
    )
    assert (answer.status_code, answer.headers["x-request-id"]) == (status, "r1")
    body = answer.json()
    assert (body["code"] if path == "/generate" else body["error"]["code"]) == code
    assert answer.headers.get("retry-after") == ("5" if status == 503 else None)
    assert not harness.engine.live


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvocationError("x"), "INVOCATION_FAILED"),
        (ConstraintError("x", "regex"), "INVALID_REQUEST_ARGS"),
    ],
)
async def test_an_error_after_the_first_token_is_the_last_event(
    path: str, error: LlmError, code: str
) -> None:
    harness = Harness(failing(error, after=TOKENIZER.encode("ab")))
    body = (
        {**json.loads(BODIES[path] % b"true"), "n": 1}
        if path != "/generate"
        else {"text": "a", "stream": True}
    )
    answer = await harness.post(path, body)
    assert answer.status_code == 200
    assert code in str(events_of(answer)[-1])


COMMENT = b": keep-alive\n\n"


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_that_waits_sends_comments(path: str) -> None:
    async with ready_server(forever(TOKENIZER, "the "), stream_keep_alive_s=0.005) as server:
        server.engine.gate.clear()
        reader, writer = await server.open_raw(path, BODIES[path] % b"true")
        async with asyncio.timeout(TIMEOUT_S):
            before = await reader.readuntil(COMMENT) + await reader.readuntil(COMMENT)
            assert before.startswith(b"HTTP/1.1 200 ")
            assert b"data:" not in before
            server.engine.gate.set()
            await reader.readuntil(b"data: ")
            server.engine.gate.clear()
            await reader.readuntil(COMMENT)
            await reader.readuntil(COMMENT)
            server.engine.gate.set()
            rest = await reader.readuntil(b"[DONE]")
        assert rest.count(b"data: ") > 9
        writer.close()


async def test_an_error_after_a_comment_is_the_last_event() -> None:
    async with ready_server(failing(InvocationError("x")), stream_keep_alive_s=0.005) as server:
        server.engine.gate.clear()
        reader, writer = await server.open_raw("/generate", b'{"text": "a", "stream": true}')
        async with asyncio.timeout(TIMEOUT_S):
            await reader.readuntil(COMMENT)
            server.engine.gate.set()
            rest = await reader.readuntil(b"[DONE]")
        assert b'data: {"error":"x","code":"INVOCATION_FAILED"}' in rest
        writer.close()


@pytest.mark.parametrize("path", PATHS)
async def test_a_disconnect_after_a_comment_aborts_all_sequences(path: str) -> None:
    async with ready_server(forever(TOKENIZER, "the "), stream_keep_alive_s=0.005) as server:
        server.engine.gate.clear()
        reader, writer = await server.open_raw(path, BODIES[path] % b"true")
        await asyncio.wait_for(reader.readuntil(COMMENT), TIMEOUT_S)
        writer.close()
        await all_freed(server)
        assert len(server.engine.aborted) == 2


@pytest.mark.parametrize("num_sent", [0, 1, 5])
async def test_a_server_that_cannot_send_ends_one_stream_alone(num_sent: int) -> None:
    harness = Harness(forever(TOKENIZER, "the "))
    body = {"text": "a", "stream": True}
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message: Message) -> None:
        if len(sent) == num_sent:
            raise OSError("the connection is gone")
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/generate", "query_string": b"", "headers": headers}
    other = asyncio.create_task(harness.post("/generate", body))
    broken = harness.app(
        {**scope, "http_version": "1.1", "server": ("test", 80), "root_path": ""}, receive, send
    )
    async with asyncio.timeout(TIMEOUT_S):
        await broken
        assert len(events_of(await other)) == 50
    assert len(harness.engine.aborted) == 1


LONG_CONTEXT = 1500


def served_by(rig: Rig) -> Callable[[Loaded], Loaded]:
    """A loader that replaces the scripted engine by the real one over a fake device."""

    def load(loaded: Loaded) -> Loaded:
        engine = AsyncEngine(rig.engine, max_requests=8)
        generator = TextGenerator(
            TOKENIZER, engine, max_seq_len=LONG_CONTEXT, max_requests=8, metrics=ServerMetrics("m")
        )
        return Loaded(replace(loaded.model, generator=generator), engine)

    return load


async def ask_and_leave_unread(server: Loopback) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Requests a stream of megabytes, of which the client reads only what fits its small buffers."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", server.port))
    reader, writer = await asyncio.open_connection(sock=client, limit=1)  # size of asyncio's buffer
    params = {"max_tokens": LONG_CONTEXT - 10, "ignore_eos": True}
    body = json.dumps({"input_ids": [1], "sampling_params": params, "stream": True}).encode()
    head = b"POST /generate HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    return reader, writer


async def test_a_client_that_stops_reading_loses_its_pages(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = make_rig(fake_config(stride=16, pages=100, max_seq_len=LONG_CONTEXT))
    async with ready_server(load=served_by(rig)) as server:
        _, writer = await ask_and_leave_unread(server)
        async with asyncio.timeout(TIMEOUT_S):
            while "reads too slowly" not in caplog.text:
                await asyncio.sleep(0.001)
            while rig.cache.usage().leased:
                await asyncio.sleep(0.001)
        assert rig.engine.stats().generation_tokens < LONG_CONTEXT - 10
        writer.transport.abort()


async def test_a_client_that_stops_reading_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "SEND_TIMEOUT_S", 0.05)
    rig = make_rig(fake_config(stride=16, pages=100, max_seq_len=LONG_CONTEXT))
    async with ready_server(load=served_by(rig)) as server:
        reader, writer = await ask_and_leave_unread(server)
        async with asyncio.timeout(TIMEOUT_S):
            while not busy(server):
                await asyncio.sleep(0)
            while busy(server):
                await asyncio.sleep(0.001)
            answer = await reader.read()
        assert b"output_ids" in answer
        assert b"[DONE]" not in answer
        writer.close()


async def test_what_has_waited_for_a_client_is_converted_in_several_turns() -> None:
    """A client with 128 choices that reads again after a pause has up to 65,536 tokens waiting for it."""
    turns, converted = StreamTurns(), []  # type: tuple[StreamTurns, list[int]]
    sent: list[bytes] = []

    def of(index: int, delta: TextDelta) -> bytes:
        converted.append(index)
        return b"%d " % index

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))

    deltas = TextDelta("", (1,) * (MAX_WORK // 2), finish_reason=FinishReason.LENGTH)
    streams = [Mock(take=Mock(side_effect=[deltas, None])) for _ in range(5)]
    events = Mock(of=of, first=lambda: b"", last=lambda: b"", done=b"done")
    request = Mock(app=Mock(state=Mock(stream_turns=turns)))
    async with asyncio.timeout(TIMEOUT_S):
        await EventStream(request, events, streams)({}, asyncio.Event().wait, send)  # type: ignore[arg-type]
    assert converted == [0, 1, 2, 3, 4]
    assert [data for data in sent if data] == [b"0 1 ", b"2 3 ", b"4 done"]


def busy(server: Loopback) -> list[BoundedProtocol]:
    """Connections with an incomplete answer."""
    protocols = [c for c in server.server.server_state.connections if isinstance(c, BoundedProtocol)]
    return [c for c in protocols if c.cycle is not None and not c.cycle.response_complete]


ENDS = "a\x85b\u2028c\u2029d"  # which some clients take for ends of lines


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/generate", {"text": ENDS}),
        ("/v1/completions", {"prompt": ENDS, "echo": True}),
        ("/v1/completions", {"prompt": "a", "logprobs": 1, "stream_options": {"include_usage": True}}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/responses", {"input": ENDS, "instructions": ENDS}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 50}),
    ],
)
async def test_no_line_of_a_stream_is_split(path: str, fields: dict[str, Any]) -> None:
    harness = Harness(saying(TOKENIZER, ENDS + ENDS))
    response = await harness.post(path, {**fields, "stream": True})
    assert response.status_code == 200, response.text
    assert response.text.splitlines() == response.text.removesuffix("\n").split("\n")
    data = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    values = [json.loads(each) for each in data if each != "[DONE]"]
    assert "\\x85" in repr(values)
    assert "\\u2028" in repr(values)


@given(st.text(), st.sampled_from("\x85\u2028\u2029"))
def test_line_ends_are_escaped(text: str, end: str) -> None:
    line = json_line([text + end])
    assert json.loads(line) == [text + end]
    assert not line.decode().splitlines()[1:]


def test_the_pages_feed_is_not_split_either() -> None:
    snapshot = Mock()
    viewer = Mock()
    viewer.view.return_value = {"tenants": [ENDS]}
    reader = Reader(viewer)
    reader.offer(snapshot)
    data = asyncio.run(reader.next())
    assert data is not None
    assert data.isascii()


class Taker(EventStream):
    def __init__(self, name: str, log: list[str], work: int = 1) -> None:
        self.name = name
        self.log = log
        self.work = work

    def convert(self) -> int:
        self.log.append(f"convert {self.name}")
        return self.work

    def send(self) -> None:
        self.log.append(f"send {self.name}")


async def test_all_streams_are_converted_and_then_sent_in_one_turn() -> None:
    turns, log = StreamTurns(), []  # type: tuple[StreamTurns, list[str]]
    for name in ("a", "b"):
        turns.add(Taker(name, log))
    assert log == []
    await asyncio.sleep(0)
    assert log == ["convert a", "convert b", "send a", "send b"]


async def test_a_stream_added_during_a_turn_takes_part_in_the_next() -> None:
    turns, log = StreamTurns(), []  # type: tuple[StreamTurns, list[str]]

    class Again(Taker):
        def send(self) -> None:
            super().send()
            if self.name == "a":
                turns.add(Taker("b", log))

    turns.add(Again("a", log))
    await asyncio.sleep(0)
    assert log == ["convert a", "send a"]
    await asyncio.sleep(0)
    assert log[2:] == ["convert b", "send b"]


async def test_more_work_than_a_turn_may_have_waits_for_the_next() -> None:
    turns, log = StreamTurns(), []  # type: tuple[StreamTurns, list[str]]
    for name in ("a", "b", "c"):
        turns.add(Taker(name, log, MAX_WORK // 2))
    await asyncio.sleep(0)
    assert log == ["convert a", "convert b", "send a", "send b"]
    await asyncio.sleep(0)
    assert log[4:] == ["convert c", "send c"]
    await asyncio.sleep(0)
    assert log[6:] == []
