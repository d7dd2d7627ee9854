from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.serving.receipts.encoding import from_text, to_text
from shortfin_apps.llm.serving.receipts.errors import ReceiptError
from shortfin_apps.llm.serving.receipts.receipt import Receipt
from tests.serving.receipts.examples import receipt_json
from tests.serving.receipts.test_encoding import VALUES


def test_comes_back_from_json() -> None:
    written = receipt_json(prompt="abc", seed=7)
    assert Receipt.parse(orjson.loads(orjson.dumps(written))).to_json() == written


def test_is_under_200_bytes_beside_ids_marks_and_sampling() -> None:
    """With every entry family that can choose a token."""
    written = receipt_json() | {"entries": ["decode", "extend", "prefill"]}
    rest = {k: v for k, v in written.items() if k not in ("prompt_ids", "output_ids", "marks", "sampling")}
    assert len(json.dumps(rest, separators=(",", ":"))) < 200


def test_has_a_byte_of_marks_for_each_token() -> None:
    written = receipt_json()
    assert len(from_text(written["marks"])) == len(written["output_ids"])
    assert from_text(written["marks"])[-1] == from_text(written["logits"])[0]


@given(VALUES)
def test_garbage_is_refused_in_a_sentence(value: Any) -> None:
    with pytest.raises(ReceiptError, match="receipt"):
        Receipt.parse(value)


@given(st.sampled_from(sorted(receipt_json())), VALUES)
def test_a_field_of_another_kind_is_refused_or_as_given(name: str, value: Any) -> None:
    try:
        parsed = Receipt.parse(receipt_json() | {name: value})
    except ReceiptError:
        return
    assert json.dumps(parsed.to_json()[name]) == json.dumps(value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2, which is newer than 1"),
        ({"version": 0}, "`version`"),
        ({"version": True}, "`version`"),
        ({"version": 1.0}, "`version`"),
        ({"artifact": "short"}, "`artifact`"),
        ({"output_ids": [1]}, "a byte for each of `output_ids`"),
        ({"output_ids": [1, 2, 2**40]}, r"`output_ids\.2`"),
        ({"prompt_ids": [True]}, r"`prompt_ids\.0`"),
        ({"finish": "error"}, "an answer that failed has none"),
        ({"finish": "done"}, "`finish`"),
        ({"key": to_text(b"k" * 8)}, "belong together"),
        ({"more": 1}, "`more`"),
        ({"sampling": []}, "`sampling`"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ReceiptError, match=message):
        Receipt.parse(receipt_json() | change)


def test_a_deep_value_is_refused() -> None:
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ReceiptError):
        Receipt.parse(receipt_json() | {"sampling": {"max_tokens": deep}})
