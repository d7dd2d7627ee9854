from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from shortfin_apps.llm import cli
from shortfin_apps.llm.api.limits import Limits
from shortfin_apps.llm.api.service import Service
from shortfin_apps.llm.components.frontend.metrics import ServerMetrics
from shortfin_apps.llm.errors import ArtifactError
from shortfin_apps.llm.server import config as server_config
from shortfin_apps.llm.server import serve as server
from shortfin_apps.llm.server.config import ServerConfigError
from shortfin_apps.llm.server.serve import LAST_STEP_S, Loaded, bind
from tests.api.harness import MODEL, TOKENIZER
from tests.api.loopback import TIMEOUT_S, Loopback, loopback
from tests.api.scripted_engine import forever
from tests.components.text.tiny_tokenizers import byte_level_tokenizer

pytestmark = pytest.mark.timeout(120)


async def test_the_port_answers_while_the_model_loads(capsys: pytest.CaptureFixture[str]) -> None:
    release = threading.Event()

    def load(loaded: Loaded) -> Loaded:
        release.wait(TIMEOUT_S)
        return loaded

    async with loopback(load=load) as server:
        assert (await server.client.get("/ready")).status_code == 503
        assert (await server.client.get("/health")).status_code == 200
        answer = await server.client.post("/generate", json={"text": "a"})
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "5"
        release.set()
        await server.until_ready()
        assert server.engine.started
        answer = await server.client.post("/generate", json={"text": "a"})
        assert answer.status_code == 200
        assert f"Serving {MODEL} at http://127.0.0.1:{server.port} " in capsys.readouterr().out
    assert server.engine.closed


@pytest.mark.parametrize("has_template", [True, False])
async def test_the_banner_suggests_what_the_model_can_do(
    has_template: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run as it is shown, the command is answered."""
    tokenizer = byte_level_tokenizer(**({} if has_template else {"chat_template": None}))
    async with loopback(tokenizer=tokenizer) as server:
        await server.until_ready()
        banner = capsys.readouterr().out
        path, body = re.search(r"curl http://[^/]+(/\S+) .*-d '(.*)'", banner, re.DOTALL).groups()  # type: ignore[union-attr]
        assert path == ("/v1/chat/completions" if has_template else "/v1/completions")
        assert (await server.client.post(path, json=json.loads(body))).status_code == 200


async def test_a_model_that_does_not_load_ends_the_server() -> None:
    def load(loaded: Loaded) -> Loaded:
        raise ArtifactError("model.vmfb: damaged")

    async with loopback(load=load) as server:
        await server.ended()
    assert str(server.server.failure) == "model.vmfb: damaged"


@pytest.mark.parametrize(
    "failure",
    [
        MemoryError(),
        RuntimeError("can't start new thread"),
        RuntimeError("Error creating driver: INTERNAL; thread creation failed with 11"),
        RuntimeError("RESOURCE_EXHAUSTED; libc allocator failed the request;\nwhile invoking"),
    ],
    ids=str,
)
async def test_a_model_that_finds_no_memory_is_one_sentence(failure: Exception) -> None:
    def load(loaded: Loaded) -> Loaded:
        raise failure

    async with loopback(load=load) as running:
        await running.ended()
    with pytest.raises(ServerConfigError, match="want of memory") as told:
        server._exit_status(running.server)
    assert "\n" not in str(told.value)


async def stream_to_end(server: Loopback) -> str:
    body = {"text": "a", "stream": True}
    async with server.client.stream("POST", "/generate", json=body) as response:
        return (await response.aread()).decode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_running_requests_finish(number: signal.Signals) -> None:
    async with loopback(forever(TOKENIZER, "the ")) as server:
        await server.until_ready()
        server.engine.gate.clear()
        answer = asyncio.create_task(stream_to_end(server))
        await server.engine.waiting.wait()
        os.kill(os.getpid(), number)
        assert (await answer).endswith("data: [DONE]\n\n")
        await server.ended()
    assert server.engine.drained_with == 5
    assert not server.server.force_exit
    assert not server.server.leaves_thread
    assert not server.engine.aborted


async def until_not_ready(server: Loopback) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while (await server.client.get("/ready")).status_code != 503:
            await asyncio.sleep(0)


async def test_the_port_answers_while_the_server_drains() -> None:
    async with loopback(forever(TOKENIZER, "the ")) as server:
        await server.until_ready()
        server.engine.stuck = True
        server.engine.gate.clear()
        answer = asyncio.create_task(stream_to_end(server))
        await server.engine.waiting.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(TIMEOUT_S):
            await server.engine.drains.wait()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as newcomer:
            ready = await newcomer.get("/ready")
            refused = await newcomer.post("/generate", json={"text": "a"})
            health = await newcomer.get("/health")
        assert (ready.status_code, refused.status_code, health.status_code) == (503, 503, 200)
        assert refused.headers["retry-after"] == "5"
        for closing in (ready, refused, health):
            assert closing.headers["connection"] == "close"
        server.engine.stuck = False
        server.engine.gate.set()
        assert (await answer).endswith("data: [DONE]\n\n")
        await server.ended()


async def test_a_request_that_is_on_its_way_when_the_port_closes_is_told_503(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with loopback() as server:
        await server.until_ready()
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
            os.kill(os.getpid(), signal.SIGTERM)
            said = await asyncio.to_thread(answers.read)
            assert said.startswith(b"HTTP/1.1 503 ")
            assert b"connection: close" in said.lower()
        await server.ended()


async def test_requests_are_taken_until_the_drain_delay_is_over() -> None:
    async with loopback(drain_delay=TIMEOUT_S * 10) as server:
        await server.until_ready()
        os.kill(os.getpid(), signal.SIGTERM)
        await until_not_ready(server)
        answer = await server.client.post("/generate", json={"text": "a"})
        assert answer.status_code == 200
        assert answer.headers["connection"] == "close"
        assert (await server.client.get("/health")).status_code == 200
        assert not server.engine.drains.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        await server.ended()


async def test_after_the_drain_delay_the_server_drains() -> None:
    async with loopback(drain_delay=0.01) as server:
        await server.until_ready()
        os.kill(os.getpid(), signal.SIGTERM)
        await server.ended()
    assert server.engine.drained_with == 5
    assert not server.server.force_exit


async def test_a_drain_delay_is_not_for_a_model_that_is_not_there() -> None:
    release = threading.Event()

    def load(loaded: Loaded) -> Loaded:
        release.wait(TIMEOUT_S)
        return loaded

    async with loopback(load=load, drain_delay=TIMEOUT_S * 10) as server:
        assert (await server.client.get("/health")).status_code == 200
        os.kill(os.getpid(), signal.SIGTERM)
        await server.ended()
    release.set()


async def test_a_second_signal_stops_at_once() -> None:
    async with loopback(forever(TOKENIZER, "the ")) as server:
        await server.until_ready()
        server.engine.stuck = True
        server.engine.gate.clear()
        answer = asyncio.create_task(stream_to_end(server))
        await server.engine.waiting.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        await server.ended()
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)
    assert server.server.force_exit
    assert server.server.leaves_thread, "the step under way did not end in time"
    assert server.engine.closed_with == LAST_STEP_S


def test_a_port_in_use_is_one_sentence() -> None:
    taken = bind("127.0.0.1", 0)
    with taken, pytest.raises(ServerConfigError, match="is in use"):
        bind("127.0.0.1", taken.getsockname()[1])


def test_an_address_that_is_not_ours_is_one_sentence() -> None:
    with pytest.raises(ServerConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        bind("192.0.2.1", 0)


@pytest.mark.parametrize("entry", [server.main, lambda argv: cli.main(["serve", *argv])])
def test_a_missing_artefact_is_one_sentence_and_exit_2(
    entry: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry(["no-such-directory"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: no-such-directory: no such directory")
    assert captured.err.count("\n") == 1


def test_ctrl_c_before_there_is_a_server_is_an_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(config: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(server, "open_artifact", interrupted)
    assert server.main(["model"]) == server.EXIT_INTERRUPTED


async def test_a_request_to_a_server_that_stopped_is_refused() -> None:
    async with loopback() as server:
        await server.until_ready()
    with pytest.raises(httpx.TransportError):
        async with httpx.AsyncClient() as client:
            await client.get(f"http://127.0.0.1:{server.port}/ready")


async def test_keys_from_the_settings_guard_the_port() -> None:
    async with loopback(api_key="k1,k2") as server:
        await server.until_ready()
        assert (await server.client.get("/metrics")).status_code == 401
        headers = {"authorization": "Bearer k2"}
        assert (await server.client.get("/metrics", headers=headers)).status_code == 200


async def test_limits_from_the_settings_hold() -> None:
    async with loopback(max_body_bytes=100, max_n=1) as server:
        await server.until_ready()
        assert (await server.client.post("/generate", json={"text": "a" * 100})).status_code == 413
        body = {"text": "a", "sampling_params": {"n": 2}}
        assert (await server.client.post("/generate", json=body)).status_code == 400


def test_every_limit_has_a_setting_with_the_same_default() -> None:
    config = server_config.load({"artifact": "model"}, {})
    assert server.limits_of(config) == Limits()


def http_config(settings: dict[str, Any]) -> None:
    config = server_config.load({"artifact": "model", **settings}, {})
    server.http_config(config, Service(name="m", metrics=ServerMetrics("m"), config={}))


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
    async with loopback(tls=trusting, ssl_certfile=path) as server:
        await server.until_ready()
        assert (await server.client.post("/generate", json={"text": "a"})).status_code == 200
        assert f"at https://127.0.0.1:{server.port} " in capsys.readouterr().out
        with pytest.raises(httpx.TransportError):
            async with httpx.AsyncClient() as plain:
                await plain.get(f"http://127.0.0.1:{server.port}/ready")


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01"], ids=["silence", "half a greeting"])
async def test_a_tls_handshake_that_does_not_end_in_time_is_closed(
    certificate: tuple[Path, ssl.SSLContext], said: bytes
) -> None:
    path, trusting = certificate
    async with loopback(tls=trusting, ssl_certfile=path, read_timeout=0.2) as server:
        await server.until_ready()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(said)
        async with asyncio.timeout(TIMEOUT_S):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""  # returns only if the server hangs up
        writer.close()
        assert (await server.client.get("/health")).status_code == 200


@pytest.mark.parametrize("content", [None, "", "no certificate"])
def test_a_bad_certificate_is_one_sentence(content: str | None, tmp_path: Path) -> None:
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
def test_a_public_server_without_keys_is_warned_about(
    host: str, flags: dict[str, str], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    http_config({"host": host, **flags})
    assert ("--api-key" in caplog.text) is warned


@pytest.mark.parametrize("level", ["info", "warning"])
def test_what_is_ignored_is_logged(level: str, tmp_path: Path) -> None:
    """In a process of its own, which sets up its logging itself."""
    (tmp_path / "server.json").write_text('{"decode_config": {"num_beams": 4}}')
    command = [sys.executable, "-m", "shortfin_apps.llm.server", "no-such-directory", "--log-level", level]
    ignored = ["--program_isolation", "per_call", "--device_ids", "0", "--server_config", "server.json"]
    environment = {**os.environ, "SHORTFIN_LLM_PORT": "tcp://10.0.0.1:80", "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(
        [*command, *ignored],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if " WARNING " in line]
    for word in ("`program_isolation`", "`decode_config.num_beams`", "`--device-ids`", "`SHORTFIN_LLM_PORT`"):
        assert sum(word in line for line in lines) == 1, done.stderr


@pytest.mark.parametrize("value", ["", ",", "k,"])
def test_no_open_server_starts_where_a_key_was_meant(
    value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHORTFIN_LLM_API_KEY", value)
    assert server.main(["no-such-directory"]) == 2
    assert capsys.readouterr().err.startswith("error: `--api-key`: ")


def test_a_damaged_key_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ServerConfigError, match="file of keys"):
        http_config({"api_key_file": tmp_path})
