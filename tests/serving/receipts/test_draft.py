from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.request.messages import ChosenLogit, FinishReason
from shortfin_apps.llm.serving.receipts.draft import ReceiptDraft, ReceiptOrder
from shortfin_apps.llm.serving.receipts.receipt import Receipt
from tests.serving.receipts.examples import IDENTITY, TOKENS, receipt_json


@given(st.lists(st.integers(1, 3), max_size=3))
def test_the_pieces_of_an_answer_are_nothing(cuts: list[int]) -> None:
    draft = ReceiptDraft(
        ReceiptOrder(identity=IDENTITY, sampling={"max_tokens": 3, "temperature": 0.0}), (1, 2, 3)
    )
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), 3], strict=True):
        piece = TOKENS[begin:end]
        draft.add([i for i, _ in piece], [ChosenLogit(logit, "decode") for _, logit in piece])
    assert draft.finish(FinishReason.LENGTH) == receipt_json()


@pytest.mark.parametrize(
    "change",
    [
        {"artifact": "YmJiYmJiYmJiYmJiYmJiYg"},
        {"tokenizer": "YmJiYmJiYmJiYmJiYmJiYg"},
        {"prompt_ids": [1, 2, 4]},
        {"sampling": {"max_tokens": 3, "temperature": 0.5}},
        {"sampling": {"max_tokens": 3, "temperature": 0.0, "seed": 1}},
    ],
)
def test_what_determines_the_answer_is_in_the_chain(change: dict[str, Any]) -> None:
    receipt, changed = Receipt.parse(receipt_json()), Receipt.parse(receipt_json() | change)
    assert receipt.new_chain().end != changed.new_chain().end


def test_an_answer_without_tokens_has_an_empty_one() -> None:
    written = receipt_json((), finish=FinishReason.ABORT)
    assert (written["output_ids"], written["marks"], written["entries"]) == ([], "", [])
