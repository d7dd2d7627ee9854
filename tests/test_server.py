from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable

import httpx
import pytest

from shortfin_apps.llm import cli, server
from shortfin_apps.llm.errors import ArtifactError
from shortfin_apps.llm.server import Loaded, bind
from shortfin_apps.llm.server_config import ServerConfigError
from tests.api.harness import MODEL, TOKENIZER
from tests.api.loopback import TIMEOUT_S, Loopback, loopback
from tests.api.scripted_engine import forever


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


async def test_a_model_that_does_not_load_ends_the_server() -> None:
    def load(loaded: Loaded) -> Loaded:
        raise ArtifactError("model.vmfb: damaged")

    async with loopback(load=load) as server:
        await server.ended()
    assert str(server.server.failure) == "model.vmfb: damaged"


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
    assert not server.engine.aborted


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


async def test_a_request_to_a_server_that_stopped_is_refused() -> None:
    async with loopback() as server:
        await server.until_ready()
    with pytest.raises(httpx.TransportError):
        async with httpx.AsyncClient() as client:
            await client.get(f"http://127.0.0.1:{server.port}/ready")
