"""Damaged files, full disks and signals: the program ends with one sentence and an exit status."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer

from shortfin_apps.llm import cli
from shortfin_apps.llm.artifact.artifact import Artifact
from tests.integration.server_process import PATIENCE_S, Service, llm, start, stop

pytestmark = pytest.mark.slow

FORGETFUL = 0  # seconds of --shutdown-timeout


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def flip(path: Path) -> None:
    """Flips a byte in the middle, as a bad disk would."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def ask_for_too_much(path: Path) -> None:
    path.write_text(path.read_text().replace('"device_block_count": ', '"device_block_count": 99999999'))


def swap_two_letters(path: Path) -> None:
    """Swaps the ids of two tokens: the file loads, but the text is different."""
    path.write_text(path.read_text().replace('"a":97,', '"b":97,').replace('"b":98,', '"a":98,'))


DAMAGE: list[tuple[str, Callable[[Path], None]]] = [
    ("model.vmfb", cut),
    ("model.vmfb", zero),
    ("model.irpa", cut),
    ("model.irpa", zero),
    ("model.irpa", flip),
    ("config.json", cut),
    ("config.json", make_folder),
    ("config.json", ask_for_too_much),
    ("tokenizer.json", cut),
    ("tokenizer.json", zero),
    ("tokenizer.json", swap_two_letters),
    ("tokenizer_config.json", cut),
    ("generation_config.json", make_folder),
    ("manifest.json", zero),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGE, ids=[f"{n} {d.__name__}" for n, d in DAMAGE])
def test_a_damaged_artefact_is_one_sentence(
    name: str,
    damage: Callable[[Path], None],
    tiny_artifact: Artifact,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_artifact.vmfb.parent, folder)
    for path in folder.iterdir():
        path.chmod(0o644)
    damage(folder / name)
    assert cli.main(["serve", str(folder), "--port", "0", "--log-level", "error"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert len(captured.err.splitlines()) == 1, captured.err
    assert name in captured.err or "--pages" in captured.err


def test_loose_files_with_a_larger_tokenizer_are_one_sentence(
    tiny_artifact: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Detected without a manifest, by the width of the logits."""
    folder = Path(shutil.copytree(tiny_artifact.vmfb.parent, tmp_path / "loose"))
    (folder / "manifest.json").unlink()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["one too many"])
    tokenizer.save(str(folder / "tokenizer.json"))
    flags = ["--tokenizer_json", "tokenizer.json", "--model_config", "config.json", "--vmfb", "model.vmfb"]
    flags += ["--parameters", "model.irpa"]
    paths = [word if word.startswith("--") else str(folder / word) for word in flags]
    assert cli.main(["serve", *paths, "--port", "0", "--log-level", "error"]) == 2
    assert "the tokenizer has 273 tokens but the model only 272" in capsys.readouterr().err


SMALL = ("--prefill-batch-sizes", "1", "--decode-batch-sizes", "1", "--chunk-sizes", "none")


def build_command(out: Path) -> list[str]:
    return llm("build", "random:tiny", "-o", str(out), *SMALL)


def test_a_killed_build_leaves_nothing_broken(tmp_path: Path) -> None:
    out, cache = tmp_path / "out", tmp_path / "cache"
    environment = {**os.environ, "SHORTFIN_LLM_CACHE": str(cache)}
    building = subprocess.Popen(build_command(out), env=environment, stderr=subprocess.PIPE, text=True)
    assert building.stderr is not None
    for line in building.stderr:
        if line.startswith("compile: compiling"):
            break
    building.kill()
    assert building.wait(PATIENCE_S) == -signal.SIGKILL
    building.stderr.close()
    assert list(cache.rglob("*.partial")), "it was killed in the middle"
    assert not out.exists()
    again = subprocess.run(build_command(out), env=environment, capture_output=True, timeout=PATIENCE_S)
    assert again.returncode == 0
    assert Artifact.open(out).manifest is not None
    assert not [*cache.rglob("*.partial"), *tmp_path.glob(".*")]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with space for the weights of `random:tiny` but not for its program."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("full", ["cache", "output"])
def test_a_full_disk_is_one_sentence(full: str, small_disk: Path, tmp_path: Path) -> None:
    cache = small_disk / "cache" if full == "cache" else tmp_path / "cache"
    environment = {**os.environ, "SHORTFIN_LLM_CACHE": str(cache)}
    out = small_disk / "out" if full == "output" else tmp_path / "out"
    run = subprocess.run(
        build_command(out), env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert run.returncode == 2
    place = f"the cache {cache}" if full == "cache" else out
    message = f"error: no space left in {place} while building {out}; free some"
    assert run.stderr.splitlines()[-1].startswith(message)
    assert not out.exists()
    assert not list(small_disk.rglob("*.partial"))


@pytest.fixture
def forgetful(tiny_artifact: Artifact) -> Iterator[Service]:
    """A server with a short drain timeout for running requests."""
    running = start(tiny_artifact, "--shutdown-timeout", str(FORGETFUL))
    yield running
    stop(running)


def long_stream(service: Service, choices: int = 1) -> Generator[str, None, None]:
    """The lines of an answer that takes seconds; returns after its first token."""
    params = {"max_completion_tokens": 900, "ignore_eos": True, "n": choices}
    body = {"text": "hello", "sampling_params": params, "stream": True}
    with httpx.stream("POST", f"{service.url}/generate", json=body, timeout=PATIENCE_S) as response:
        yield from response.iter_lines()


def test_requests_running_at_the_drain_timeout_are_answered_as_aborted(forgetful: Service) -> None:
    lines = long_stream(forgetful)
    next(lines)
    forgetful.process.send_signal(signal.SIGTERM)
    rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"type":"abort"' in rest[-2]
    assert forgetful.process.wait(PATIENCE_S) == 0


def until_not_ready(service: Service) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while httpx.get(f"{service.url}/ready", timeout=PATIENCE_S).status_code != 503:
        assert time.monotonic() < give_up, "/ready does not tell that the server stops"


def test_new_requests_while_draining_are_answered_503(tiny_artifact: Artifact) -> None:
    service = start(tiny_artifact, "--shutdown-timeout", "60")
    try:
        lines = long_stream(service, choices=16)
        next(lines)
        service.process.send_signal(signal.SIGTERM)
        until_not_ready(service)
        refused = httpx.post(f"{service.url}/generate", json={"text": "hello"}, timeout=PATIENCE_S)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert httpx.get(f"{service.url}/health", timeout=PATIENCE_S).status_code == 200
        rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert sum('"type":"length"' in line for line in rest) >= 16
        assert service.process.wait(PATIENCE_S) == 0
    finally:
        stop(service)


def test_a_second_signal_ends_running_streams(tiny_artifact: Artifact) -> None:
    service = start(tiny_artifact, "--shutdown-timeout", "60")
    try:
        lines = long_stream(service)
        next(lines)
        service.process.send_signal(signal.SIGTERM)
        for _ in range(20):
            next(lines)  # it goes on
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(PATIENCE_S) == 1
        lines.close()
    finally:
        stop(service)


def until_running(service: Service) -> None:
    """Waits for the first request: a busy machine's client may take long to send it."""
    give_up = time.monotonic() + PATIENCE_S
    while not re.search(
        r"^vllm:num_requests_running\{.*\} [1-9]", httpx.get(f"{service.url}/metrics").text, re.M
    ):
        assert time.monotonic() < give_up, "no request runs"


def long_answer(service: Service) -> httpx.Response:
    params = {"max_completion_tokens": 900, "ignore_eos": True, "n": 16}
    body = {"text": "hello", "sampling_params": params}
    return httpx.post(f"{service.url}/generate", json=body, timeout=PATIENCE_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_is_logged_and_clients_are_answered(
    tiny_artifact: Artifact, number: signal.Signals
) -> None:
    service = start(tiny_artifact, "--shutdown-timeout", "60")
    try:
        with ThreadPoolExecutor() as clients:
            whole = clients.submit(long_answer, service)
            until_running(service)
            lines = long_stream(service, choices=16)
            next(lines)
            service.process.send_signal(number)
            until_not_ready(service)
            service.process.send_signal(number)
            rest = [line for line in lines if line]
            assert whole.result(PATIENCE_S).status_code == 503
        assert "UNAVAILABLE" in rest[-2]
        assert service.process.wait(PATIENCE_S) == 1
        service.log.seek(0)
        log = service.log.read()
        assert "Traceback" not in log
        assert "ERROR" not in log
        assert "at once" in log
    finally:
        stop(service)
