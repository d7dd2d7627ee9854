from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bench.peers.__main__ import main
from shortfin_apps.llm.artifact.artifact import Artifact


def test_an_unknown_server_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cache", str(tmp_path), "--servers", "ours,other"]) == 2
    assert "'other'; choose from ours, ours-default, llama, vllm, vllm-zen" in capsys.readouterr().err


def test_unsupported_weights_are_refused_before_set_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--cache", str(tmp_path), "--servers", "vllm", "--weights", "q8_0"]) == 2
    assert "leave it out" in capsys.readouterr().err
    assert not any((tmp_path / "stamps").glob("*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--weights", "bf16,q5"], "'q5'; choose from bf16, q8_0, q4_1"),
        (["--weights", "bf16,q8_0", "--artefact", "DIR"], "one `--weights` with `--artefact`"),
    ],
)
def test_invalid_kinds_of_weights_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["--cache", str(tmp_path), *options]) == 2
    assert message in capsys.readouterr().err


def test_missing_requirements_are_reported_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no compilers
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("CXX", raising=False)
    assert main(["--cache", str(tmp_path), "--set-up-only", "--vllm-python", "no-such-python"]) == 2
    told = capsys.readouterr().err
    for word in ("apt-get install g++", "python3-venv", "torch 2.13.0+cpu"):
        assert word in told
    assert not any((tmp_path / "stamps").glob("*"))
    assert not (tmp_path / "logs").exists(), "no step was begun"


@pytest.mark.slow
def test_both_batch_modes_in_one_campaign(
    tiny_artifact: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = str(tiny_artifact.vmfb.parent)
    file = tmp_path / "measured.json"
    options = ["--servers", "ours,ours-default", "--preset", "W1", "--repeat", "1", "--json", str(file)]
    assert main(["--cache", str(tmp_path), "--artefact", directory, *options]) == 0
    runs = json.loads(file.read_text(encoding="utf-8"))["bf16"]["runs"]
    assert [(run["target"], run["errors"]) for run in runs] == [("ours", 0), ("ours-default", 0)]
    assert "ours-default" in capsys.readouterr().out
