"""`shortfin-llm batch` as a process, which is killed at random."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.offline.batch.output import state_path
from tests.integration.served_tiny import MODEL, serving
from tests.integration.server_process import llm, start, stop
from tests.offline.batch.batches import ids_in, line, results_in, write

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
POLL_S = 0.002


def lines(count: int) -> list[str]:
    """Short requests of both routes, with greedy answers."""
    return [
        line(str(number), max_tokens=number % 9 + 1, temperature=0)
        if number % 2
        else json.dumps(
            {
                "custom_id": str(number),
                "method": "POST",
                "url": CHAT,
                "body": {
                    "messages": [{"role": "user", "content": f"say {number}"}],
                    "max_completion_tokens": number % 7 + 1,
                    "temperature": 0,
                },
            }
        )
        for number in range(count)
    ]


def batch(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = llm("batch", *map(str, arguments))
    return subprocess.run(command, capture_output=True, text=True, check=False)


def kill_at(size: int, out: Path, *arguments: object) -> None:
    """Starts a run, and kills it once the output has `size` bytes, unless it ends before."""
    running = subprocess.Popen(llm("batch", *map(str, arguments)), stdout=subprocess.DEVNULL)
    while running.poll() is None and not (out.exists() and out.stat().st_size >= size):
        with suppress(subprocess.TimeoutExpired):
            running.wait(POLL_S)
    running.send_signal(signal.SIGKILL)
    running.wait()


def answers(out: Path) -> dict[str, Any]:
    """The choices of each line."""
    return {each["custom_id"]: each["response"]["body"]["choices"] for each in results_in(out)}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("count", "num_kills"), [(300, 2), pytest.param(2_000, 5, marks=pytest.mark.by_hand)]
)
def test_a_batch_that_is_killed_at_random_answers_each_line_once(
    tiny_artifact: Artifact, tmp_path: Path, count: int, num_kills: int
) -> None:
    source, out, model = (
        write(tmp_path / "in.jsonl", lines(count)),
        tmp_path / "out.jsonl",
        tiny_artifact.vmfb.parent,
    )
    arguments = [source, model, "-o", out, "--token-budget", "320", "--verify", "none"]
    draw = random.Random(os.environ.get("BATCH_SEED", "0"))
    sizes = []
    for _ in range(num_kills):
        before = out.stat().st_size if out.exists() else 0
        kill_at(before + draw.randrange(1, count * 500 // (num_kills + 1)), out, *arguments)
        sizes.append(out.stat().st_size)
        num_lines = out.read_bytes().count(b"\n")
        print(f"killed with {num_lines:,} lines, {sizes[-1]:,} bytes")
    assert sizes == sorted(sizes)
    done = batch(*arguments)
    print(done.stderr, done.stdout)
    assert done.returncode == 0
    assert sorted(ids_in(out), key=int) == [str(number) for number in range(count)]
    whole = tmp_path / "whole.jsonl"
    assert batch(source, model, "-o", whole, "--token-budget", "320", "--verify", "none").returncode == 0
    assert answers(out) == answers(whole)


async def test_answers_are_those_of_http(tiny_artifact: Artifact, tmp_path: Path) -> None:
    requests = [*lines(6), line("bad", max_tokens=-1), line("large", prompt="x" * (5 << 20))]
    requests.append(line("many", prompt=["a", "b"], n=3, temperature=0))
    source, out = write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    arguments = (
        source,
        tiny_artifact.vmfb.parent,
        "-o",
        out,
        "--served-model-name",
        MODEL,
        "--token-budget",
        "320",
    )
    done = batch(*arguments)
    assert done.returncode == 1
    assert "9 lines: 7 answered, 2 failed" in done.stdout
    got = {each["custom_id"]: each["response"] for each in results_in(out)}
    async with serving(tiny_artifact, token_budget=320) as (client, _):
        for request in map(json.loads, requests):
            response = await client.post(request["url"], json=request["body"])
            answer = got[request["custom_id"]]
            assert answer["status_code"] == response.status_code
            changing = dict.fromkeys(("id", "created", "usage"))
            assert answer["body"] | changing == response.json() | changing


def test_a_server_answers_the_same(tiny_artifact: Artifact, tmp_path: Path) -> None:
    requests = [
        *lines(40),
        line("native", "/generate", prompt=None, text="a", sampling_params={"max_tokens": 2}),
    ]
    source, errors = write(tmp_path / "in.jsonl", requests[:40]), tmp_path / "bad.jsonl"
    more = write(tmp_path / "more.jsonl", requests)
    service = start(tiny_artifact, "--api-key", "k", "--max-running", "2", "--max-queue", "3")
    try:
        over_http = batch(
            more, "-o", tmp_path / "a", "--url", service.url, "--api-key", "k", "--errors", errors
        )
        refused = batch(source, "-o", tmp_path / "b", "--url", service.url, "--api-key", "other")
    finally:
        stop(service)
    assert over_http.returncode == 1, over_http.stderr  # `prompt` is no field of /generate
    assert ids_in(errors) == ["native"]
    assert refused.returncode == 2
    assert refused.stderr == (
        "0 of 40 lines are done; the same command continues with the rest\n"
        "error: the server refuses access: the API key is not one of this server's keys; check it\n"
    )
    here = batch(source, tiny_artifact.vmfb.parent, "-o", tmp_path / "c", "--token-budget", "320")
    assert here.returncode == 0
    assert answers(tmp_path / "a") == answers(tmp_path / "c")


def test_ctrl_c_keeps_what_was_answered(tiny_artifact: Artifact, tmp_path: Path) -> None:
    source, out = write(tmp_path / "in.jsonl", lines(400)), tmp_path / "out.jsonl"
    command = llm(
        "batch", str(source), str(tiny_artifact.vmfb.parent), "-o", str(out), "--token-budget", "320"
    )
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not (out.exists() and out.stat().st_size):
        with suppress(subprocess.TimeoutExpired):
            running.wait(POLL_S)
    running.send_signal(signal.SIGINT)
    _, told = running.communicate()
    assert running.returncode == 130
    assert told == f"{len(ids_in(out))} of 400 lines are done; the same command continues with the rest\n"
    assert state_path(out).exists()
