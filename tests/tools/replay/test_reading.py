from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.serving.receipts.receipt import Receipt, ReceiptError
from shortfin_apps.llm.tools.replay.reading import read_receipts, receipts_in
from tests.serving.receipts.examples import receipt_json

WRITTEN = receipt_json()
RECEIPT = Receipt.parse(WRITTEN)
CHOICE = {"index": 0, "text": "abc", "receipt": WRITTEN}
NATIVE = {
    "responses": [{"prompt": None, "responses": [{"output_ids": [5], "meta_info": {"receipt": WRITTEN}}]}]
}
LINE = json.dumps(WRITTEN)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (LINE, 1),
        (json.dumps(WRITTEN, indent=2), 1),
        (json.dumps([WRITTEN, WRITTEN]), 2),
        (json.dumps({"choices": [CHOICE, {**CHOICE, "receipt": None}, CHOICE]}), 2),
        (json.dumps(NATIVE), 1),
        (f"{LINE}\n\n{json.dumps(NATIVE)}\n{json.dumps({'choices': []})}\n", 2),
        (f": ping\n\ndata: {json.dumps({'choices': [CHOICE]})}\n\ndata: [DONE]\n\n", 1),
        ("{}", 0),
        ("", 0),
    ],
)
def test_receipts_are_found_wherever_they_are(text: str, count: int) -> None:
    assert list(receipts_in(text.encode())) == [RECEIPT] * count


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "receipt.json").write_text(LINE)
    assert read_receipts(str(tmp_path / "receipt.json")) == [RECEIPT]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{}", "holds no receipt; an answer has one if"),
        (b"\xff\x00", "line 1 is not JSON"),
        (LINE.encode() + b"\n{", "line 2 is not JSON"),
        (b"[" * 100_000, "line 1 is not JSON"),
        (json.dumps(WRITTEN | {"marks": "!"}).encode(), "this is no receipt: `marks`"),
        (json.dumps({"prompt_ids": [1]}).encode(), "this is no receipt"),
    ],
)
def test_another_file_is_refused_in_a_sentence(text: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(text)
    with pytest.raises(ReceiptError, match=message):
        read_receipts(str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("no-such", "No such file or directory"), (".", "Is a directory"), ("a\0b", "embedded null byte")],
)
def test_what_is_no_file_is_named_once(name: str, reason: str) -> None:
    with pytest.raises(ReceiptError) as refusal:
        read_receipts(name)
    assert str(refusal.value) == f"{name!r}: cannot be read ({reason})"


@given(st.binary())
def test_garbage_raises_nothing_else(text: bytes) -> None:
    found: list[Any] = []
    try:
        found += receipts_in(text)
    except ReceiptError:
        return
    assert not found
