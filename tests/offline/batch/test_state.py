from __future__ import annotations

import os
from pathlib import Path

import pytest

from shortfin_apps.llm.offline.batch.errors import BatchFileError
from shortfin_apps.llm.offline.batch.state import BatchState, read_state, state_path, write_state


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    for state in (BatchState("12", None), BatchState("34", "../bad.jsonl")):
        write_state(output, state)
        assert read_state(output) == state
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl.state.json"]


@pytest.mark.parametrize("content", [b"", b"{}", b"\0" * 64, b'{"input_sha256": 1, "errors": null}'])
def test_what_is_no_state_is_none(tmp_path: Path, content: bytes) -> None:
    output = tmp_path / "out.jsonl"
    assert read_state(output) is None
    state_path(output).write_bytes(content)
    assert read_state(output) is None


@pytest.mark.timeout(20)
def test_a_pipe_is_no_state(tmp_path: Path) -> None:
    os.mkfifo(state_path(tmp_path / "out.jsonl"))
    assert read_state(tmp_path / "out.jsonl") is None


@pytest.mark.parametrize("suffix", ["", ".new"])
def test_a_link_in_the_place_of_a_state_has_no_other_file_overwritten(tmp_path: Path, suffix: str) -> None:
    output, target = tmp_path / "out.jsonl", tmp_path / "target"
    target.write_text("precious")
    state_path(output).with_name(f"{state_path(output).name}{suffix}").symlink_to(target)
    write_state(output, BatchState("12", None))
    assert read_state(output) == BatchState("12", None)
    assert target.read_text() == "precious"
    assert not state_path(output).is_symlink()


def test_a_folder_in_the_place_of_a_new_state_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl.state.json.new").mkdir()
    with pytest.raises(BatchFileError, match=r"cannot write .*out.jsonl.state.json"):
        write_state(tmp_path / "out.jsonl", BatchState("12", None))


def test_a_state_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match=r"cannot write .*out.jsonl.state.json: No such file"):
        write_state(tmp_path / "none" / "out.jsonl", BatchState("12", None))
