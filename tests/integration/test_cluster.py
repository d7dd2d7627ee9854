"""`shortfin-llm cluster` with real workers behind the real router."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from tests.integration.server_process import PATIENCE_S, llm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("smg") is None, reason="smg is not installed (the extra `cluster`)"
    ),
    pytest.mark.timeout(180),
]

KEYS = ("sk-alice", "sk-bob")
READY = re.compile(r"worker (\d).* is ready.*\(process (\d+)")


@dataclass
class Cluster:
    process: subprocess.Popen[str]
    url: str = ""
    workers: dict[str, int] = field(default_factory=dict)  # process ids by number

    def read_until(self, what: str) -> str:
        """The next line that holds `what`; notes which workers became ready."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if ready := READY.search(line):
                self.workers[ready[1]] = int(ready[2])
            if what in line:
                return line
        raise AssertionError(f"the cluster ended with {self.process.wait()} before it said {what!r}")

    def client(self, key: str | None = KEYS[0]) -> httpx.AsyncClient:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=PATIENCE_S)

    def processes(self) -> list[int]:
        """All processes that descend from the cluster's, itself excluded."""
        found, left = [], [self.process.pid]
        while left:
            task = Path(f"/proc/{(pid := left.pop())}/task/{pid}/children")
            left += (children := [int(word) for word in task.read_text().split()])
            found += children
        return found


@contextmanager
def cluster(artifact: Artifact, *flags: str) -> Iterator[Cluster]:
    command = llm(
        "cluster", str(artifact.vmfb.parent), "--workers", "2", "--port", "0", "--metrics-port", "0"
    )
    environment = {**os.environ, "SHORTFIN_LLM_API_KEY": ",".join(KEYS)}
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            [*command, *flags], stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        ) as process,
    ):
        running = Cluster(process)
        try:
            running.url = running.read_until(" at http").split(" at ")[1].split()[0]
            yield running
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(PATIENCE_S)
            finally:
                process.kill()
                log.seek(0)
                print(log.read())  # pytest shows it if a test fails


def body(number: int, tokens: int = 8) -> dict[str, object]:
    prompt = f"{number} and what follows"
    return {"model": "random-tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}


async def until_gone(pid: int) -> None:
    while is_running(pid):
        await asyncio.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether the process is there and has not ended; one that ended may wait for its parent to ask."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_no_whole_answer_is_lost_when_a_worker_is_killed(tiny_artifact: Artifact) -> None:
    with cluster(tiny_artifact) as running:
        victim = running.workers["1"]
        async with running.client() as client, asyncio.timeout(PATIENCE_S):
            posts = [client.post("/v1/completions", json=body(n, tokens=200)) for n in range(16)]
            answering = [asyncio.create_task(post) for post in posts]
            await asyncio.wait(answering, return_when=asyncio.FIRST_COMPLETED)
            os.kill(victim, signal.SIGKILL)
            answers = await asyncio.gather(*answering)
            assert [answer.status_code for answer in answers] == [200] * 16
            assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {200}
            running.read_until("worker 1 is ready again")
            assert running.workers["1"] != victim
            while (await client.get("/readiness")).json()["healthy_workers"] < 2:
                await asyncio.sleep(0.05)
            metrics = (await client.get("/engine_metrics")).text
        assert len(set(re.findall(r'vllm:num_requests_running\{.*worker_addr="([^"]+)"', metrics))) == 2
        processes = running.processes()
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(PATIENCE_S) == 0
    assert [pid for pid in processes if is_running(pid)] == []


async def test_keys_are_wired_and_in_no_process_list(tiny_artifact: Artifact) -> None:
    with cluster(tiny_artifact) as running:
        for key, status in ((KEYS[0], 200), (KEYS[1], 200), ("sk-mallory", 401), (None, 401)):
            async with running.client(key) as client:
                assert (await client.post("/v1/completions", json=body(1))).status_code == status
            # The router closes a connection whose request it refuses before the body has arrived.
            async with running.client(key) as client:
                assert (await client.get("/workers")).status_code == 401
        processes = running.processes()
        shown = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes)
        shown += b"".join(Path(f"/proc/{pid}/environ").read_bytes() for pid in processes)
        assert not any(key.encode() in shown for key in KEYS)
        # The wrapper is killed: everything else drains and ends.
        running.process.kill()
        async with asyncio.timeout(PATIENCE_S):
            for pid in processes:
                await until_gone(pid)
