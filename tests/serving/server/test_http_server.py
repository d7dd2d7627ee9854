from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
import uvicorn

from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.serving.api.service import Service
from shortfin_apps.llm.serving.frontend.metrics import ServerMetrics
from shortfin_apps.llm.serving.server import config_sources, http_server
from shortfin_apps.llm.serving.server.config import ServerConfigError
from shortfin_apps.llm.serving.server.http_server import LAST_STEP_S, bind, warn_if_open
from shortfin_apps.llm.serving.server.model_loading import Loaded
from tests.serving.api.harness import MODEL, TOKENIZER
from tests.serving.api.loopback import TIMEOUT_S, Loopback, loopback, ready_server
from tests.serving.api.scripted_engine import ScriptedEngine, forever
from tests.serving.text.tiny_tokenizers import byte_level_tokenizer

pytestmark = pytest.mark.timeout(120)


class BlockedLoader:
    """A model loader that waits for `release`."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def __call__(self, loaded: Loaded) -> Loaded:
        self.release.wait(TIMEOUT_S)
        return loaded


@pytest.fixture
def blocked_loader() -> Iterator[BlockedLoader]:
    loader = BlockedLoader()
    yield loader
    loader.release.set()


@asynccontextmanager
async def server_with_stream() -> AsyncIterator[tuple[Loopback, asyncio.Task[str]]]:
    """A server in the middle of a streamed answer, which waits at the engine's gate."""
    async with ready_server(forever(TOKENIZER, "the ")) as server:
        server.engine.gate.clear()
        answer = asyncio.create_task(stream_to_end(server))
        await server.engine.waiting.wait()
        yield server, answer


def send_signal(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


async def until_drain(server: Loopback) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        await server.engine.drains.wait()


async def stream_to_end(server: Loopback) -> str:
    body = {"text": "a", "stream": True}
    async with server.client.stream("POST", "/generate", json=body) as response:
        return (await response.aread()).decode()


async def until_not_ready(server: Loopback) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while (await server.client.get("/ready")).status_code != 503:
            await asyncio.sleep(0)


async def test_the_port_answers_while_the_model_loads(
    blocked_loader: BlockedLoader, capsys: pytest.CaptureFixture[str]
) -> None:
    async with loopback(load=blocked_loader) as server:
        assert (await server.client.get("/ready")).status_code == 503
        assert (await server.client.get("/health")).status_code == 200
        answer = await server.client.post("/generate", json={"text": "a"})
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "5"
        blocked_loader.release.set()
        await server.until_ready()
        assert server.engine.started
        answer = await server.client.post("/generate", json={"text": "a"})
        assert answer.status_code == 200
        assert f"Serving {MODEL} at http://127.0.0.1:{server.port} " in capsys.readouterr().out
    assert server.engine.closed


@pytest.mark.parametrize("has_template", [True, False])
async def test_the_banner_suggests_a_request_the_model_can_answer(
    has_template: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command in the banner works as printed."""
    tokenizer = byte_level_tokenizer(**({} if has_template else {"chat_template": None}))
    async with ready_server(tokenizer=tokenizer) as server:
        banner = capsys.readouterr().out
        path, body = re.search(r"curl http://[^/]+(/\S+) .*-d '(.*)'", banner, re.DOTALL).groups()  # type: ignore[union-attr]
        assert path == ("/v1/chat/completions" if has_template else "/v1/completions")
        assert (await server.client.post(path, json=json.loads(body))).status_code == 200


async def test_a_model_that_fails_to_load_ends_the_server() -> None:
    def load(loaded: Loaded) -> Loaded:
        raise ArtifactError("model.vmfb: damaged")

    async with loopback(load=load) as server:
        await server.ended()
    assert str(server.server.failure) == "model.vmfb: damaged"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_running_requests_finish(number: signal.Signals) -> None:
    async with server_with_stream() as (server, answer):
        send_signal(number)
        assert (await answer).endswith("data: [DONE]\n\n")
        await server.ended()
    assert server.engine.drained_with == 5
    assert not server.server.force_exit
    assert not server.server.leaves_thread
    assert not server.engine.aborted


async def test_the_port_answers_while_the_server_drains() -> None:
    async with server_with_stream() as (server, answer):
        server.engine.stuck = True
        send_signal()
        await until_drain(server)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as other_client:
            ready = await other_client.get("/ready")
            refused = await other_client.post("/generate", json={"text": "a"})
            health = await other_client.get("/health")
        assert (ready.status_code, refused.status_code, health.status_code) == (503, 503, 200)
        assert refused.headers["retry-after"] == "5"
        for closing in (ready, refused, health):
            assert closing.headers["connection"] == "close"
        server.engine.stuck = False
        server.engine.gate.set()
        assert (await answer).endswith("data: [DONE]\n\n")
        await server.ended()


async def test_a_request_received_just_before_the_port_closes_gets_503(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with ready_server() as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S) as late:
            late.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            answers = late.makefile("rb")
            while await asyncio.to_thread(answers.readline) != b"\r\n":
                pass
            assert await asyncio.to_thread(answers.read, 20) == b'{"status":"healthy"}'
            drain = server.engine.drain

            async def drain_and_ask(timeout_s: float) -> None:
                await drain(timeout_s)
                late.sendall(b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n")
                late.sendall(b'Content-Length: 13\r\n\r\n{"text": "a"}')

            monkeypatch.setattr(server.engine, "drain", drain_and_ask)
            send_signal()
            answer = await asyncio.to_thread(answers.read)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"connection: close" in answer.lower()
        await server.ended()


async def test_requests_are_accepted_during_the_drain_delay() -> None:
    async with ready_server(drain_delay=TIMEOUT_S * 10) as server:
        send_signal()
        await until_not_ready(server)
        answer = await server.client.post("/generate", json={"text": "a"})
        assert answer.status_code == 200
        assert answer.headers["connection"] == "close"
        assert (await server.client.get("/health")).status_code == 200
        assert not server.engine.drains.is_set()
        send_signal()
        await server.ended()


async def test_the_server_drains_after_the_drain_delay() -> None:
    async with ready_server(drain_delay=0.01) as server:
        send_signal()
        await server.ended()
    assert server.engine.drained_with == 5
    assert not server.server.force_exit


async def test_a_loading_server_stops_without_the_drain_delay(blocked_loader: BlockedLoader) -> None:
    async with loopback(load=blocked_loader, drain_delay=TIMEOUT_S * 10) as server:
        assert (await server.client.get("/health")).status_code == 200
        send_signal()
        await server.ended()


async def test_a_second_signal_stops_at_once() -> None:
    async with server_with_stream() as (server, answer):
        server.engine.stuck = True
        send_signal()
        send_signal()
        await server.ended()
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)
    assert server.server.force_exit
    assert server.server.leaves_thread, "the current step did not end in time"
    assert server.engine.closed_with == LAST_STEP_S


async def test_a_second_signal_while_the_engine_closes_stops_at_once() -> None:
    """The engine's step takes for ever; the signal comes after the first wait for it has begun."""
    asked: list[float] = []
    signalled = asyncio.Event()

    class Engine(ScriptedEngine):
        async def close(self, patience_s: float = math.inf) -> bool:
            asked.append(patience_s)
            if patience_s == math.inf:
                signalled.set()
                await asyncio.Event().wait()
            return False

    assert not await http_server.close_engine(Engine(forever(TOKENIZER, "the ")), signalled.is_set)
    assert asked == [math.inf, LAST_STEP_S]


def test_a_port_in_use_is_reported() -> None:
    taken = bind("127.0.0.1", 0)
    with taken, pytest.raises(ServerConfigError, match="is in use"):
        bind("127.0.0.1", taken.getsockname()[1])


def test_an_address_of_another_host_is_reported() -> None:
    with pytest.raises(ServerConfigError, match=r"192\.0\.2\.1, port 0 \([\w ]+\); give an address"):
        bind("192.0.2.1", 0)


async def test_a_stopped_server_refuses_connections() -> None:
    async with ready_server() as server:
        pass
    with pytest.raises(httpx.TransportError):
        async with httpx.AsyncClient() as client:
            await client.get(f"http://127.0.0.1:{server.port}/ready")


async def test_api_keys_from_the_settings_are_required() -> None:
    async with ready_server(api_key="k1,k2") as server:
        assert (await server.client.get("/metrics")).status_code == 401
        headers = {"authorization": "Bearer k2"}
        assert (await server.client.get("/metrics", headers=headers)).status_code == 200


async def test_limits_from_the_settings_apply() -> None:
    async with ready_server(max_body_bytes=100) as server:
        assert (await server.client.post("/generate", json={"text": "a" * 100})).status_code == 413


def http_config(settings: dict[str, Any]) -> uvicorn.Config:
    config = config_sources.load({"artifact": "model", **settings})
    return http_server.http_config(config, Service(name="m", metrics=ServerMetrics("m"), config={}))


def test_an_idle_connection_outlives_those_that_clients_keep() -> None:
    assert http_config({}).timeout_keep_alive == 75


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ssl.SSLContext]:
    """A file with a key and its certificate for 127.0.0.1, and a context that trusts it."""
    authority = trustme.CA()
    path = tmp_path_factory.mktemp("tls") / "cert.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(path)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    return path, trusting


async def test_tls(certificate: tuple[Path, ssl.SSLContext], capsys: pytest.CaptureFixture[str]) -> None:
    path, trusting = certificate
    async with ready_server(tls=trusting, ssl_certfile=path) as server:
        assert (await server.client.post("/generate", json={"text": "a"})).status_code == 200
        assert f"at https://127.0.0.1:{server.port} " in capsys.readouterr().out
        with pytest.raises(httpx.TransportError):
            async with httpx.AsyncClient() as plain:
                await plain.get(f"http://127.0.0.1:{server.port}/ready")


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"], ids=["nothing", "half a ClientHello"])
async def test_a_tls_handshake_times_out(certificate: tuple[Path, ssl.SSLContext], sent: bytes) -> None:
    path, trusting = certificate
    async with ready_server(tls=trusting, ssl_certfile=path, read_timeout=0.2) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        async with asyncio.timeout(TIMEOUT_S):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""  # returns only if the server disconnects
        writer.close()
        assert (await server.client.get("/health")).status_code == 200


@pytest.mark.parametrize("content", [None, "", "no certificate"])
def test_a_bad_certificate_is_reported(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "cert.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ServerConfigError, match="--ssl-certfile"):
        http_config({"ssl_certfile": path})


@pytest.mark.parametrize(
    ("host", "flags", "warned"),
    [
        ("127.0.0.1", {}, False),
        ("::1", {}, False),
        ("localhost", {}, False),
        ("0.0.0.0", {}, True),
        ("192.0.2.1", {}, True),
        ("example.org", {"admin_api_key": "root"}, True),
        ("0.0.0.0", {"api_key": "k"}, False),
    ],
)
def test_a_public_server_without_keys_logs_a_warning(
    host: str, flags: dict[str, str], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_open(config_sources.load({"artifact": "model", "host": host, **flags}))
    assert ("--api-key" in caplog.text) is warned


def test_an_unreadable_key_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ServerConfigError, match="file of keys"):
        http_config({"api_key": f"@{tmp_path}"})
