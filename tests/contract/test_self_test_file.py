from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.contract.self_test_file import DECODE_STEPS, SelfTestFile, TestLayout

FILE = SelfTestFile(
    format_version=2, stride=4, pools={"whole": (0, 1)}, tolerance=0.5, sample_ids=(1, 2), prompts=()
)


@given(stride=st.integers(1, 300), context=st.integers(1, 1000))
def test_every_checked_position_is_within_the_prompt(stride: int, context: int) -> None:
    context = max(context, stride, DECODE_STEPS)
    layout = TestLayout.of(stride, context)
    assert layout.length <= context
    assert all(0 <= position < layout.length for position in layout.checked)
    assert all(base % stride == 0 and base + DECODE_STEPS <= layout.length for base in layout.bases)
    assert all(0 <= start < stop <= layout.length for start, stop in layout.summed)


def test_a_file_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "self_test.json"
    path.write_bytes(FILE.to_json())
    assert SelfTestFile.load(path) == FILE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{}", "format None"),
        (b'{"format_version": 1}', "format 1 are not read"),
        (b'{"format_version": 2}', "`stride`"),
        (b"[", "Invalid JSON"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "self_test.json"
    path.write_bytes(text)
    with pytest.raises(ArtifactError, match=message) as caught:
        SelfTestFile.load(path)
    assert "--self-test off" in str(caught.value)
    assert str(path) in str(caught.value)
