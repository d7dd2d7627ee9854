"""Measures a pack part by part, each in a separate process, until everything is done or time is up."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from bench.gpu.environment import MODELS, facts_of
from bench.gpu.models import MODELS as KNOWN
from bench.gpu.models import Model
from bench.gpu.report import write_report
from bench.gpu.weights import complete
from shortfin_apps.llm.contract.iree_release import runtime_release

PARTS = ("tokens", "entries", "engine", "drafts", "http", "transformers")
RESULTS = "results.jsonl"
IN_PROCESS = ("entries", "engine", "drafts")  # run one after the other with weights loaded once
TORCH = "import torch, transformers, sys; sys.exit(not torch.cuda.is_available())"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to measure, and where; `python` is the machine's own interpreter, which may have torch.

    Models that are not timed are only checked for their tokens, unless they are in `named`.
    """

    device: str
    models: Sequence[str]
    named: Sequence[str]
    parts: Sequence[str]
    sample_seconds: float
    seconds: float | None
    python: str


def run(pack: Path, out: Path, choice: Choice) -> int:
    """Write `results.jsonl`, `results.md` and plots to `out`; return the number of failed parts."""
    deadline = None if choice.seconds is None else time.monotonic() + choice.seconds
    out.mkdir(parents=True, exist_ok=True)
    results = out / RESULTS
    _append(results, _header(pack, choice))
    failed = 0
    with _ended_by_sigterm(), TemporaryDirectory(prefix="gpu-") as scratch:
        for job in jobs(choice):
            if deadline is not None and deadline <= time.monotonic():
                _append(results, {"part": "skipped", "parts": job.parts, "model": job.model})
                continue
            directory = _completed(pack, Path(scratch), job.model, results)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            status = _run_job(job, pack, directory, results, choice, left)
            if status is not None:
                failed += 1
                _append(results, {"part": "failed", "parts": job.parts, "model": job.model, "why": status})
            write_report(results, out)
    return failed


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Have SIGTERM leave the `with` block as SystemExit, so that no worker stays on the device."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(frozen=True, slots=True)
class Job:
    """Parts of one model that run in one process."""

    model: str
    parts: tuple[str, ...]


def jobs(choice: Choice) -> Iterator[Job]:
    """Yield the chosen parts, model by model, in the processes of `_groups`."""
    for name in choice.models:
        for group in _groups(KNOWN[name], name in choice.named):
            parts = tuple(part for part in group if part in choice.parts)
            if parts and (parts != ("transformers",) or _has_torch(choice.python)):
                yield Job(name, parts)


def _groups(model: Model, is_named: bool) -> list[tuple[str, ...]]:
    """Group parts by process. Tokens come first, as times of wrong results are meaningless."""
    timed: list[tuple[str, ...]] = [IN_PROCESS, ("http",)]
    if model.is_timed:
        is_llama = model.spec.architecture == "llama"  # the only one that transformers_peer.py supports
        return [*timed, *([("transformers",)] if is_llama else [])]
    return [("tokens",), *timed] if is_named else [("tokens",)]


def _run_job(
    job: Job, pack: Path, directory: Path, results: Path, choice: Choice, left_s: float | None
) -> str | None:
    """Run a job; return None if it succeeded, otherwise how it ended."""
    print(f"{job.model}: {', '.join(job.parts)}", file=sys.stderr, flush=True)
    # A separate session, so that killing a part also ends its server.
    process = subprocess.Popen(_command(job, pack, directory, results, choice), start_new_session=True)
    try:
        status = process.wait(left_s)
    except subprocess.TimeoutExpired:
        return "the time was over"
    finally:  # also if this process is told to end
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return None if status == 0 else f"status {status}"


def _command(job: Job, pack: Path, directory: Path, results: Path, choice: Choice) -> list[str]:
    if job.parts == ("transformers",):
        script = Path(__file__).with_name("transformers_peer.py")
        manifest = directory / "manifest.json"
        context = str(KNOWN[job.model].context)
        return [choice.python, str(script), str(manifest), "--context", context, "--results", str(results)]
    return [
        *(sys.executable, "-m", "bench.gpu.worker", ",".join(job.parts), str(pack), job.model),
        *(str(directory), "--device", choice.device, "--results", str(results)),
        *("--sample-seconds", str(choice.sample_seconds)),
    ]


def _completed(pack: Path, scratch: Path, model: str, results: Path) -> Path:
    """Return the model's directory with parameters. Only one model's are kept at a time."""
    directory = scratch / model
    if not directory.exists():
        for other in scratch.iterdir():
            _remove(other)
        begin = time.monotonic()
        complete(pack / MODELS / model, directory)
        _append(results, {"part": "weights", "model": model, "seconds": time.monotonic() - begin})
    return directory


def _remove(directory: Path) -> None:
    for file in directory.iterdir():
        file.unlink()
    directory.rmdir()


def _has_torch(python: str) -> bool:
    return subprocess.run([python, "-c", TORCH], capture_output=True, check=False).returncode == 0


def _header(pack: Path, choice: Choice) -> dict[str, Any]:
    return {
        "part": "machine",
        "pack": facts_of(pack),
        "device": choice.device,
        "gpus": _gpus(),
        "cpus": os.cpu_count(),
        "system": platform.platform(),
        "iree": str(runtime_release()),
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _gpus() -> list[str]:
    """Return NVIDIA's name and driver version of each GPU; empty if the tool is missing."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def _append(results: Path, record: dict[str, Any]) -> None:
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
