"""A server whose emulated GPU hangs, is lost, or runs a kernel without end: status, dump, restart, tokens."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from emulated_gpu.chips import CHIPS
from emulated_gpu.library import LIBRARY, EmulatedGpu
from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.recorder.dump_file import read_dump
from shortfin_apps.llm.components.recorder.records import Header
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.serving.server.start_up import EXIT_DEVICE_LOST
from tests.conftest import BuildTiny
from tests.hip import CHIPS as TESTED
from tests.integration.server_process import PATIENCE_S, Service, start, stop
from tests.matrices import slow_but
from tests.runtimes import needs_shortfin

pytestmark = [needs_shortfin, pytest.mark.emulated, pytest.mark.timeout(900)]

FLAGS = ("--device", "hip", "--self-test", "off", "--stall-timeout", "3")
MAX_TOKENS = 4
HEALTH_S = 2.0
# Commands of the emulated GPU, by what happens to it.
FAULTS = {
    "hang": "stall 0",
    "lost": "lose 0",
    "lost at launch 5": "fail-launch 5 719",
    "endless kernel": "max-instructions 10",
}
ON_EVERY_CHIP = ("endless kernel", "lost at launch 5")


@dataclass(frozen=True)
class Served:
    service: Service
    pipe: Path
    dumps: Path

    def strike(self, fault: str) -> None:
        self.pipe.write_text(FAULTS[fault] + "\n")

    def ask(self, **more: Any) -> httpx.Response:
        params = {"max_completion_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": [5, 6, 7], "sampling_params": params, **more}
        return httpx.post(f"{self.service.url}/generate", json=body, timeout=PATIENCE_S)

    def tokens(self) -> list[int]:
        answer = self.ask()
        assert answer.status_code == 200, answer.text
        token_ids: list[int] = answer.json()["responses"][0]["responses"][0]["output_ids"]
        return token_ids

    def until_it_fails(self) -> httpx.Response:
        """Asks until the fault has struck: the server reads the command in a thread of its own."""
        while (answer := self.ask()).status_code == 200:
            pass
        return answer

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.service.url}{path}", timeout=PATIENCE_S)

    def until_it_serves_again(self) -> None:
        """Asks until another process answers, and has its model; an API process learns of a loss in 0.1 s."""
        for is_ready in (False, True):
            give_up_s = time.monotonic() + PATIENCE_S
            while self.is_ready() is not is_ready:
                assert time.monotonic() < give_up_s, "it does not serve again"

    def is_ready(self) -> bool:
        try:
            return self.get("/ready").status_code == 200
        except httpx.TransportError:  # the old process ends
            return False

    def last_dump(self) -> Header:
        newest = max(self.dumps.glob("*.jsonl.gz"), key=lambda path: path.stat().st_mtime_ns)
        return read_dump(newest).header

    def log(self) -> str:
        self.service.log.seek(0)
        return self.service.log.read()


@contextmanager
def served(artifact: Artifact, chip: str, folder: Path, *flags: str) -> Iterator[Served]:
    pipe, dumps = folder / "control", folder / "dumps"
    os.mkfifo(pipe)
    gpu = EmulatedGpu(chip, control=pipe)
    flags = (*FLAGS, "--dump-dir", str(dumps), *flags)
    running = start(artifact, *flags, environment=gpu.environment())
    try:
        yield Served(running, pipe, dumps)
    finally:
        stop(running)


def build_small(build_tiny: BuildTiny, chip: str) -> Artifact:
    return build_tiny(BuildOptions(device=f"hip:{chip}", prefill_batch_sizes=(2,), decode_batch_sizes=(4,)))


def check_dump(server: Served, fault: str) -> None:
    header = server.last_dump()
    assert header.device.startswith("hip")
    last = header.last_launch
    assert last is not None
    assert last.entry.startswith(("prefill", "decode", "extend", "sample"))
    assert last.rows == 1
    assert last.state != "done"
    assert last.state == "running" or fault != "hang"
    assert f"the last launch: {last.entry} with 1 rows" in server.log()


@pytest.mark.parametrize("fault", slow_but(["hang"], FAULTS))
@pytest.mark.parametrize("processes", [0, 2])
def test_the_server_ends_with_its_status_and_a_dump(
    build_tiny: BuildTiny, tmp_path: Path, processes: int, fault: str
) -> None:
    artifact = build_small(build_tiny, "gfx942")
    with served(artifact, "gfx942", tmp_path, "--api-processes", str(processes)) as server:
        server.tokens()
        server.strike(fault)
        answer = server.until_it_fails()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        began_s = time.monotonic()
        while (health := server.get("/health")).status_code == 200:
            pass  # an API process learns of it within 0.1 s
        assert time.monotonic() - began_s < HEALTH_S
        assert health.status_code == 503
        assert "the device" in health.json()["reason"]
        assert server.service.process.wait(PATIENCE_S) == EXIT_DEVICE_LOST
        check_dump(server, fault)


@pytest.mark.parametrize("chip", slow_but(["gfx1100"], CHIPS))
def test_a_server_that_is_started_again_gives_the_same_tokens(
    build_tiny: BuildTiny, tmp_path: Path, chip: str
) -> None:
    """After each fault, one after the other; two of them on chips that differ in their code alone."""
    artifact = build_small(build_tiny, chip)
    with served(artifact, chip, tmp_path, "--restart-on-device-loss") as server:
        expected = server.tokens()
        maps = Path(f"/proc/{server.service.process.pid}/maps").read_text()
        assert LIBRARY not in maps, "a supervisor with the driver holds the device"
        for fault in FAULTS if chip in TESTED else ON_EVERY_CHIP:
            server.strike(fault)
            assert server.until_it_fails().status_code == 503
            server.until_it_serves_again()
            check_dump(server, fault)
            assert server.tokens() == expected
        server.service.process.send_signal(signal.SIGTERM)
        assert server.service.process.wait(PATIENCE_S) == 0
