"""Several processes answer HTTP over one engine: real processes, real connections, real deaths."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.serving.server.http_server import STOPPING
from tests.integration.server_process import PATIENCE_S, Service, start, stop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

KEY = "root"
ADMIN = {"Authorization": f"Bearer {KEY}"}
BODY = {"prompt": "The capital of France", "temperature": 0, "ignore_eos": True}


def serving(artifact: Artifact, *flags: str) -> contextlib.AbstractContextManager[Service]:
    return _serving(artifact, "--api-processes", "2", "--admin-api-key", KEY, *flags)


@contextlib.contextmanager
def _serving(artifact: Artifact, *flags: str) -> Iterator[Service]:
    service = start(artifact, *flags)
    try:
        yield service
    finally:
        pids = api_processes(service)
        if service.process.poll() is None:
            assert stop(service) == 0
        else:
            stop(service)
        until(lambda: not any(is_alive(pid) for pid in pids))


def until(holds: Any) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up_s, "it never came to be"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


def api_processes(service: Service) -> list[int]:
    found = subprocess.run(
        ["pgrep", "-P", str(service.process.pid), "-f", "api_process"], capture_output=True, text=True
    )
    return [int(pid) for pid in found.stdout.split()]


def complete(service: Service, **fields: Any) -> httpx.Response:
    """On a connection of its own, which any of the processes may take."""
    return httpx.post(
        f"{service.url}/v1/completions",
        json={**BODY, "max_tokens": 8, **fields},
        headers=ADMIN,
        timeout=PATIENCE_S,
    )


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


class Streaming(threading.Thread):
    """A streamed completion on its own connection; `text` is what has come, `ended` whether [DONE] has."""

    def __init__(self, service: Service, request_id: str, max_tokens: int) -> None:
        super().__init__()
        self._service = service
        self._id = request_id
        self._max_tokens = max_tokens
        self.text, self.ended, self.has_begun = "", False, threading.Event()
        self.reason: str | None = None
        self.error: Any = None
        self.start()

    def run(self) -> None:
        body = {**BODY, "max_tokens": self._max_tokens, "stream": True}
        headers = {**ADMIN, "X-Request-Id": self._id}
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.stream(
                "POST", f"{self._service.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S
            ) as answer,
        ):
            for line in answer.iter_lines():
                self._read(line)
        self.has_begun.set()

    def _read(self, line: str) -> None:
        if line == "data: [DONE]":
            self.ended = True
        elif line.startswith("data: "):
            event = json.loads(line[6:])
            self.error = self.error or event.get("error")
            for choice in event.get("choices", ()):
                self.text += choice["text"]
                self.reason = choice["finish_reason"] or self.reason
            self.has_begun.set()


def test_both_processes_answer_as_one_would(tiny_artifact: Artifact) -> None:
    alone = start(tiny_artifact)
    try:
        expected = text_of(complete(alone))
        longer = text_of(complete(alone, max_tokens=30))
    finally:
        assert stop(alone) == 0
    with serving(tiny_artifact) as service:
        assert len(api_processes(service)) == 2
        assert [text_of(complete(service)) for _ in range(8)] == [expected] * 8
        streams = [Streaming(service, f"s{i}", 30) for i in range(8)]
        for stream in streams:
            stream.join()
        assert [stream.text for stream in streams] == [longer] * 8
        assert all(stream.ended for stream in streams)
        answer = complete(service, n=3, seed=7, temperature=1)
        assert len(answer.json()["choices"]) == 3
        assert text_of(complete(service, guided_regex="[ab]{4}", ignore_eos=False)).strip("ab") == ""
        assert service.metric("vllm:request_success_total") == 8 + 8 + 3 + 1
        assert complete(service, max_tokens=10**6).status_code == 400


def test_an_abort_reaches_the_process_that_has_the_request(tiny_artifact: Artifact) -> None:
    with serving(tiny_artifact) as service:
        for number in range(6):  # connections of either process
            stream = Streaming(service, f"long-{number}", 400)
            assert stream.has_begun.wait(PATIENCE_S)
            answer = httpx.post(f"{service.url}/abort", json={"rid": f"long-{number}"}, headers=ADMIN)
            stream.join()
            if answer.json() == {"aborted": 1}:  # else it had ended
                assert stream.reason in ("abort", "length")
        assert (
            httpx.post(f"{service.url}/log_level", json={"level": "error"}, headers=ADMIN).status_code == 200
        )


def test_a_dead_api_process_loses_its_own_streams_alone_and_is_replaced(tiny_artifact: Artifact) -> None:
    with serving(tiny_artifact) as service:
        expected = text_of(complete(service, max_tokens=400))
        before = service.metric("vllm:request_success_total")
        streams = [Streaming(service, str(i), 400) for i in range(8)]
        for stream in streams:
            assert stream.has_begun.wait(PATIENCE_S)
        victim, survivor = api_processes(service)
        os.kill(victim, signal.SIGKILL)
        killed_s = time.monotonic()
        for stream in streams:
            stream.join()
        assert all(stream.text == expected for stream in streams if stream.ended)
        assert all(expected.startswith(stream.text) for stream in streams)
        until(lambda: service.metric("vllm:num_requests_running") == 0)
        codes = set()
        while (started := api_processes(service)) == [survivor] or time.monotonic() - killed_s < 5:
            codes.add(complete(service, max_tokens=1).status_code)
        assert codes == {200}, "a process that is starting takes no connections"
        assert len(started) == 2
        assert survivor in api_processes(service)
        assert service.metric("vllm:request_success_total") >= before
        assert [text_of(complete(service, max_tokens=400)) for _ in range(4)] == [expected] * 4


def test_nothing_outlives_the_process_of_the_engine(tiny_artifact: Artifact) -> None:
    with serving(tiny_artifact) as service:
        streams = [Streaming(service, str(i), 400) for i in range(8)]
        for stream in streams:
            assert stream.has_begun.wait(PATIENCE_S)
        pids = api_processes(service)
        service.process.kill()
        killed_s = time.monotonic()
        until(lambda: not any(is_alive(pid) for pid in pids))
        assert time.monotonic() - killed_s < PATIENCE_S / 2
        for stream in streams:
            stream.join()
            assert stream.reason == "length" or not stream.ended or stream.error is not None
        service.log.seek(0)
        assert service.log.read().count(" ERROR ") == len(pids), "one line each, whatever they had to answer"
        with pytest.raises(httpx.TransportError):
            complete(service)


def test_a_signal_lets_the_streams_of_all_processes_finish(tiny_artifact: Artifact) -> None:
    with serving(tiny_artifact) as service:
        expected = text_of(complete(service, max_tokens=200))
        streams = [Streaming(service, str(i), 200) for i in range(8)]
        for stream in streams:
            assert stream.has_begun.wait(PATIENCE_S)
        service.process.send_signal(signal.SIGTERM)
        for stream in streams:
            stream.join()
        assert [(stream.text, stream.ended) for stream in streams] == [(expected, True)] * 8
        assert service.process.wait(PATIENCE_S) == 0
        service.log.seek(0)
        assert service.log.read().count(STOPPING) == 1
