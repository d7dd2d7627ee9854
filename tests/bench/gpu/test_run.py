from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from bench.gpu import run as run_module
from bench.gpu.environment import FACTS, PackError, make_environment
from bench.gpu.models import MODELS, Model
from bench.gpu.run import Choice, Job, jobs, run
from shortfin_apps.llm.model.config import context_length

TINY, TIMED = "random-tiny", "smollm2-135m"
CHOICE = Choice(
    device="cpu",
    models=(TINY, TIMED),
    named=(),
    parts=("tokens", "entries", "engine", "http", "transformers"),
    sample_seconds=0.01,
    seconds=None,
    python=sys.executable,
)


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "_has_torch", lambda python: False)


@pytest.mark.usefixtures("without_torch")
def test_of_a_model_that_is_not_timed_there_are_only_tokens() -> None:
    assert list(jobs(CHOICE)) == [
        Job(TINY, ("tokens",)),
        Job(TIMED, ("entries", "engine")),
        Job(TIMED, ("http",)),
    ]


@pytest.mark.parametrize(("name", "has_peer"), [(TIMED, True), ("hybrid-0.8b", False)])
def test_transformers_has_a_peer_of_llamas_alone(
    name: str, has_peer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_has_torch", lambda python: True)
    parts = [job.parts for job in jobs(replace(CHOICE, models=(name,)))]
    assert (("transformers",) in parts) == has_peer


@pytest.mark.usefixtures("without_torch")
def test_a_model_that_is_named_is_timed_in_any_case() -> None:
    named = replace(CHOICE, models=(TINY,), named=(TINY,), parts=("tokens", "engine"))
    assert list(jobs(named)) == [Job(TINY, ("tokens",)), Job(TINY, ("engine",))]


def test_transformers_are_measured_where_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "_has_torch", lambda python: python == sys.executable)
    assert Job(TIMED, ("transformers",)) in list(jobs(CHOICE))


def test_parts_are_left_out_and_named_when_the_time_is_over(tmp_path: Path) -> None:
    (tmp_path / FACTS).write_text(json.dumps({"python": "3.12", "commit": "abc1234"}))
    out = tmp_path / "out"
    assert run(tmp_path, out, replace(CHOICE, models=(TINY,), seconds=0)) == 0
    records = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [record["part"] for record in records] == ["machine", "skipped"]
    assert records[1]["parts"] == ["tokens"]


def test_wheels_of_another_python_are_refused(tmp_path: Path) -> None:
    (tmp_path / FACTS).write_text(json.dumps({"python": "3.8"}))
    with pytest.raises(PackError, match=r"run this with python3\.8"):
        make_environment(tmp_path, tmp_path / "environment")


def test_a_folder_that_is_no_pack_is_named(tmp_path: Path) -> None:
    with pytest.raises(PackError, match="is no pack"):
        make_environment(tmp_path, tmp_path / "environment")


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.name)
def test_every_case_fits_the_context_of_its_model(model: Model) -> None:
    prompts = [*(tokens for _, tokens in model.prefills), *(tokens for tokens, _ in model.extends)]
    assert max(model.context, *prompts) <= context_length(model.spec, model.options)


def test_a_run_that_is_terminated_leaves_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_torch: None
) -> None:
    (tmp_path / FACTS).write_text(json.dumps({"python": "3.12", "commit": "abc1234"}))
    os.mkfifo(tmp_path / "pid")
    script = (
        f"import os, signal; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); signal.pause()"
    )
    monkeypatch.setattr(run_module, "_command", lambda *_: [sys.executable, "-c", script])
    monkeypatch.setattr(run_module, "_completed", lambda *_: tmp_path)
    worker: list[int] = []

    def terminate() -> None:
        worker.append(int((tmp_path / "pid").read_text()))
        os.kill(os.getpid(), signal.SIGTERM)

    thread = Thread(target=terminate)
    thread.start()
    with pytest.raises(SystemExit):
        run(tmp_path, tmp_path / "out", replace(CHOICE, models=(TINY,)))
    thread.join()
    with pytest.raises(ProcessLookupError):
        os.kill(worker[0], 0)
