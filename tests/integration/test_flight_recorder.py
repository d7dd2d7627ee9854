"""Dumps of real servers, replayed by the command: under load, of a fault, with API processes, on a GPU."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.recorder.dump_file import read_dump
from shortfin_apps.llm.components.recorder.dumps import Dumps
from shortfin_apps.llm.components.recorder.flight_recorder import FlightRecorder
from shortfin_apps.llm.components.recorder.records import Header
from shortfin_apps.llm.components.runtime.open import open_device
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from shortfin_apps.llm.serving.loading import make_engine
from shortfin_apps.llm.tools.dump_replay.replay import Verdict
from shortfin_apps.llm.tools.dump_replay.session import Where, replay
from tests.conftest import BuildTiny
from tests.hip import EmulatedGpus
from tests.integration.generation import generate
from tests.integration.server_process import PATIENCE_S, Service, llm, start_with, stop
from tests.integration.test_not_a_number import BAD, spoil

pytestmark = pytest.mark.slow

ADMIN = {"authorization": "Bearer root"}


@contextmanager
def serving(directory: Path, dumps: Path, *flags: str) -> Iterator[Service]:
    own = ("--admin-api-key", "root", "--dump-dir", str(dumps), "--verify", "none")
    service = start_with(str(directory), *own, *flags)
    try:
        yield service
    finally:
        stop(service)


def generate_on(service: Service, prompts: list[list[int]], **params: Any) -> httpx.Response:
    body = {
        "input_ids": prompts,
        "sampling_params": {"max_completion_tokens": 24, "ignore_eos": True, **params},
    }
    return httpx.post(f"{service.url}/generate", json=body, timeout=PATIENCE_S)


def dumped(directory: Path, number: int) -> list[Path]:
    """Waits for so many dumps."""
    give_up = time.monotonic() + PATIENCE_S
    while len(found := sorted(directory.glob("*.gz"))) < number:
        assert time.monotonic() < give_up, "there is no dump"
    return found


def replayed(dump: Path, directory: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    command = llm("replay-dump", str(dump), str(directory), "--json", "-", *flags)
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert run.stdout, run.stderr
    return run.returncode, json.loads(run.stdout)


def api_process_of(service: Service) -> int:
    """One of the processes that answer HTTP; the only one, if there is one."""
    pid = service.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    others = [child for child in children if b"api_process" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return int(others[0]) if others else pid


def prompts_of(seed: int) -> list[list[int]]:
    stem = [(7 * index) % 90 for index in range(40)]
    return [[*stem[: 20 + seed], seed, 3], [seed, *stem]]


@pytest.mark.parametrize("flags", [(), ("--api-processes", "2")], ids=["one process", "API processes"])
def test_a_server_under_load_is_dumped_and_replayed(
    tiny_artifact: Artifact, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    directory = tiny_artifact.vmfb.parent
    with serving(directory, tmp_path, *flags) as service, ThreadPoolExecutor() as clients:
        generate_on(service, prompts_of(0))
        answers = [
            clients.submit(generate_on, service, prompts_of(seed), temperature=0.8) for seed in range(6)
        ]
        os.kill(api_process_of(service), signal.SIGUSR1)
        asked = httpx.post(f"{service.url}/debug/dump", headers=ADMIN, timeout=PATIENCE_S)
        for answer in answers:
            assert answer.result(PATIENCE_S).status_code == 200
        sent = httpx.post(f"{service.url}/debug/dump?download=true", headers=ADMIN, timeout=PATIENCE_S)
        paths = dumped(tmp_path, 3)
    assert Path(asked.json()["file"]) in paths
    (tmp_path / "sent").write_bytes(sent.content)
    for path in (*paths, tmp_path / "sent"):
        status, found = replayed(path, directory)
        assert (status, found["replay"]["is_as_recorded"]) == (0, True), found
    assert found["replay"]["records"]["same"] == found["dump"]["invocations"] > 20


@pytest.fixture
def spoiled(tiny_artifact: Artifact, tmp_path: Path) -> Path:
    """An artefact with a token whose embedding is NaN."""
    directory = tmp_path / "spoiled"
    shutil.copytree(tiny_artifact.vmfb.parent, directory)
    (directory / "model.irpa").unlink()
    spoil(tiny_artifact, directory, {BAD: float("nan")})
    return directory


def test_a_fault_of_a_running_server_is_dumped_and_replayed(
    tiny_artifact: Artifact, spoiled: Path, tmp_path: Path
) -> None:
    """It comes out again on what was served; on what should have been, that row is another."""
    with serving(spoiled, tmp_path / "dumps") as service:
        assert generate_on(service, prompts_of(1)).status_code == 200
        failed = generate_on(service, [[1, 2, BAD, 4]])
        assert "finite" in failed.text
        [path] = dumped(tmp_path / "dumps", 1)
    status, found = replayed(path, spoiled)
    assert status == 0
    assert "row of NaN" in found["dump"]["reason"]
    status, found = replayed(path, tiny_artifact.vmfb.parent)
    assert status == 1
    [notable] = found["replay"]["notable"]
    assert (notable["verdict"], notable["position"]) == ("differs", 3)
    assert notable["request"] in found["dump"]["reason"]


def test_a_trace_needs_no_artefact(tiny_artifact: Artifact, tmp_path: Path) -> None:
    with serving(tiny_artifact.vmfb.parent, tmp_path) as service:
        generate_on(service, prompts_of(1))
        asked = httpx.post(f"{service.url}/debug/dump", headers=ADMIN, timeout=PATIENCE_S)
    trace = tmp_path / "trace.json"
    command = llm("replay-dump", asked.json()["file"], "--trace", str(trace))
    assert subprocess.run(command, capture_output=True, timeout=PATIENCE_S).returncode == 0
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"step", "queued", "prefill", "decode"} <= names


def test_a_server_without_a_recorder_says_so(tiny_artifact: Artifact, tmp_path: Path) -> None:
    service = start_with(str(tiny_artifact.vmfb.parent), "--admin-api-key", "root", "--dump-dir", "off")
    try:
        service.process.send_signal(signal.SIGUSR1)
        asked = httpx.post(f"{service.url}/debug/dump", headers=ADMIN, timeout=PATIENCE_S)
        assert asked.status_code == 400
        assert "--dump-dir off" in asked.text
    finally:
        assert stop(service) == 0


@pytest.mark.emulated
@pytest.mark.timeout(300)
def test_a_dump_of_a_cpu_is_replayed_on_an_emulated_gpu(
    tiny_artifact: Artifact, build_tiny: BuildTiny, emulated_gpus: EmulatedGpus, tmp_path: Path
) -> None:
    """By best candidates, as the program is another; the GPU's checks find nothing."""
    recorder = FlightRecorder()
    device = open_device("cpu", "iree")
    options = EngineSettings(runtime="iree")
    engine = make_engine(
        device,
        tiny_artifact.config,
        tiny_artifact.vmfb,
        tiny_artifact.parameters,
        frozenset(),
        options,
        recorder=recorder,
    )
    generate(engine, [[5, 6, 7, 8], list(range(20))], 5)
    stats = engine.stats()
    assert tiny_artifact.manifest is not None
    header = Header(
        files={"model.vmfb": tiny_artifact.manifest.files["model.vmfb"].sha256},
        device="cpu",
        num_pages=stats.pages.total + 1,
        stride=stats.page_tokens,
    )
    written = Dumps(recorder, tmp_path, header).write("a test")
    device.close()
    with emulated_gpus.watch("gfx942"):
        few = BuildOptions(
            device="hip:gfx942", prefill_batch_sizes=(2,), decode_batch_sizes=(4,), extend_sizes=(64,)
        )
        on_gpu = build_tiny(few)
        summary = replay(read_dump(written.path), on_gpu.vmfb.parent, Where(device="hip"))
    assert not summary.is_same_program
    assert summary.counts[Verdict.SAME] == sum(summary.counts.values()) > 3, summary
