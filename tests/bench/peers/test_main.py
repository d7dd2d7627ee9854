from __future__ import annotations

from pathlib import Path

import pytest

from bench.peers.__main__ import main


def test_an_unknown_server_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cache", str(tmp_path), "--servers", "ours,other"]) == 2
    assert "'other'; choose from ours, llama, vllm" in capsys.readouterr().err


def test_weights_that_a_server_cannot_take_are_refused_before_anything_is_set_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--cache", str(tmp_path), "--servers", "vllm", "--weights", "q8_0"]) == 2
    assert "leave it out" in capsys.readouterr().err
    assert not any((tmp_path / "stamps").iterdir())
