from __future__ import annotations

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


def test_a_state_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match=r"cannot write .*out.jsonl.state.json: No such file"):
        write_state(tmp_path / "none" / "out.jsonl", BatchState("12", None))
