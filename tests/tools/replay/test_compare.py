from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.components.request.messages import FinishReason
from shortfin_apps.llm.console import PlainConsole
from shortfin_apps.llm.serving.receipts.receipt import Receipt, to_text
from shortfin_apps.llm.tools.replay.compare import (
    Outcome,
    Replayed,
    computed_again,
    difference,
    other_model,
    replayed_of,
    table,
)
from tests.serving.receipts.examples import IDENTITY, TOKENS, receipt_json

RECEIPT = Receipt.parse(receipt_json())


def again(
    tokens: tuple[tuple[int, float], ...] = TOKENS, finish: FinishReason | None = FinishReason.LENGTH
) -> Replayed:
    return computed_again(RECEIPT, [i for i, _ in tokens], [logit for _, logit in tokens], finish)


def test_the_same_is_the_same() -> None:
    assert difference(RECEIPT, again()) is None
    assert difference(RECEIPT, again(finish=None)) is None
    assert difference(RECEIPT, replayed_of(RECEIPT)) is None


def test_another_token_is_named() -> None:
    tokens = (*TOKENS[:1], (9, -0.25), *TOKENS[2:])
    assert difference(RECEIPT, again(tokens)) == "differs at token 2 of 3: 6 is now 9"


def test_another_logit_of_the_same_token_is_shown() -> None:
    tokens = (*TOKENS[:1], (6, -0.5), *TOKENS[2:])
    assert difference(RECEIPT, again(tokens)) == (
        "differs at token 2 of 3: the token is 6 as it was, but its logit, now -0.5, has other bits"
        " (or that of a token before it)"
    )


@given(st.integers(0, 2), st.integers(0, 30))
def test_any_bit_of_any_logit_is_noticed(index: int, bit: int) -> None:
    [bits] = struct.unpack("<I", struct.pack("<f", TOKENS[index][1]))
    [logit] = struct.unpack("<f", struct.pack("<I", bits ^ 1 << bit))
    tokens = (*TOKENS[:index], (TOKENS[index][0], logit), *TOKENS[index + 1 :])
    found = difference(RECEIPT, again(tokens))
    assert found is not None
    assert "differs at token" in found or "no mark tells" in found


def test_ends_are_told() -> None:
    assert difference(RECEIPT, again(TOKENS[:2], FinishReason.STOP)) == "ends after 2 of 3 tokens"
    longer = again((*TOKENS, (1, 1.0)))
    assert difference(RECEIPT, longer) == "continues after token 3, which was the last"
    aborted = Receipt.parse(receipt_json(finish=FinishReason.ABORT))
    assert difference(aborted, longer) is None


def test_a_changed_digest_is_told() -> None:
    changed = replace(RECEIPT, logits=to_text(b"x" * 16))
    found = difference(changed, again())
    assert found is not None
    assert found.startswith("the digest is ")


@pytest.mark.parametrize(
    ("was", "now", "sampling", "same"),
    [
        ("length", FinishReason.STOP, {}, False),
        ("stop", FinishReason.LENGTH, {}, False),
        ("stop", FinishReason.LENGTH, {"stop": ["a"]}, True),  # strings are not matched in this process
        ("abort", FinishReason.LENGTH, {}, True),
        ("length", None, {}, True),
    ],
)
def test_the_reason_of_an_end_counts(
    was: str, now: FinishReason | None, sampling: dict[str, Any], same: bool
) -> None:
    receipt = Receipt.parse(receipt_json(finish=FinishReason(was), **sampling))
    replayed = computed_again(receipt, [i for i, _ in TOKENS], [logit for _, logit in TOKENS], now)
    assert (difference(receipt, replayed) is None) is same


def test_another_model_is_named() -> None:
    assert other_model(RECEIPT, IDENTITY) is None
    other = replace(IDENTITY, tokenizer="x")
    assert other_model(RECEIPT, other) == f"its tokenizer is {IDENTITY.tokenizer}, and this one x"
    assert other_model(RECEIPT, replace(other, artifact="y")) == (
        f"its artifact is {IDENTITY.artifact}, and this one y, and "
        f"its tokenizer is {IDENTITY.tokenizer}, and this one x"
    )


def shown(*outcomes: Outcome) -> str:
    console = PlainConsole(width=120)
    with console.capture() as captured:
        console.print(table(outcomes))
    return captured.get()


def test_first_differences_are_shown_and_all_are_written() -> None:
    outcome = Outcome("alone", 3)
    for index, text in enumerate([None, "differs at token 1", "differs at token 2"]):
        outcome.add(index, text)
    assert "1 of 3" in shown(outcome)
    assert "receipt 2 differs at token 1" in shown(outcome)
    assert outcome.document()["differences"] == [
        {"receipt": 2, "difference": "differs at token 1"},
        {"receipt": 3, "difference": "differs at token 2"},
    ]


def test_a_schedule_that_was_not_run_is_not_ok() -> None:
    outcome = Outcome("extend-attention", 2, skipped="no entries")
    assert (outcome.num_same, outcome.document()["skipped"]) == (0, "no entries")
    assert "not run: no entries" in shown(outcome)


def test_counts_are_shown() -> None:
    outcome = Outcome("preempted", 1, details={"preemptions": 2})
    assert "ok (preemptions: 2)" in shown(outcome)
    assert outcome.document()["preemptions"] == 2


def test_texts_of_receipts_are_no_markup_and_control_no_terminal() -> None:
    outcome = Outcome("alone", 1, skipped="\x1b[2J[red][/x]")
    assert "not run: ␛[2J[red][/x]" in shown(outcome)
