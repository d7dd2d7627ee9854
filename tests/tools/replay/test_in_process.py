"""Receipts of the tiny model, replayed under every schedule, and forged ones."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.batching import BATCH_MODES
from shortfin_apps.llm.components.batching.mode import BatchSettings
from shortfin_apps.llm.components.request.messages import FinishReason
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.contract.errors import ArtifactError, InvalidRequestError, LlmError
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.serving.receipts.receipt import Receipt, ReceiptError, from_text, to_text
from shortfin_apps.llm.tools.replay.compare import Outcome
from shortfin_apps.llm.tools.replay.in_process import EXTEND, SCHEDULES, Schedule, opened, replay
from tests.components.fake_device import fake_config
from tests.conftest import BuildTiny


def test_every_mode_computes_alone_and_in_a_full_batch_and_after_preemptions() -> None:
    for mode in BATCH_MODES:
        kinds = {(s.fills_batch, s.preempts) for s in SCHEDULES.values() if s.mode == mode}
        assert kinds >= {(False, False), (True, False), (False, True)}


def test_chunks_are_a_page_only_where_that_is_said() -> None:
    config = fake_config(stride=4)
    for schedule in SCHEDULES.values():
        options = schedule.mode_options(config)
        assert options.chunk_tokens == (4 if schedule.is_chunked else None)
        assert options.batch_mode == schedule.mode


def with_another_byte(data: bytes, index: int) -> bytes:
    return bytes(each ^ (number == index) for number, each in enumerate(data))


def outcome_of(artifact: Artifact, receipts: Sequence[Receipt], schedule: str = "alone") -> Outcome:
    with opened(artifact.vmfb.parent, receipts) as subject:
        return replay(subject, SCHEDULES[schedule])


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_gives_the_same_bits(
    tiny_artifact: Artifact, receipts: list[Receipt], name: str
) -> None:
    outcome = outcome_of(tiny_artifact, receipts, name)
    assert (outcome.differences, outcome.num_same, outcome.skipped) == ({}, len(receipts), None)
    assert all(count > 0 for count in outcome.details.values()), "it did what its name says"
    assert bool(outcome.details) == (SCHEDULES[name].preempts or SCHEDULES[name].is_warm)


@pytest.mark.parametrize(
    "change",
    [
        {"output_ids": lambda r: (*r.output_ids[:4], r.output_ids[4] ^ 1, *r.output_ids[5:])},
        {"marks": lambda r: to_text(with_another_byte(from_text(r.marks), 4))},
        {"logits": lambda r: to_text(b"x" * 16)},
        {"prompt_ids": lambda r: (*r.prompt_ids, 5)},
        {"sampling": lambda r: r.sampling | {"seed": 12345}},
        {"sampling": lambda r: r.sampling | {"temperature": 0.5}},
        {"finish": lambda r: FinishReason.STOP},
        {"output_ids": lambda r: r.output_ids[:9], "marks": lambda r: to_text(from_text(r.marks)[:9])},
    ],
)
def test_a_forged_receipt_is_told(
    tiny_artifact: Artifact, receipts: list[Receipt], change: dict[str, Any]
) -> None:
    """The others, which are replayed with it, are the same."""
    forged = replace(receipts[1], **{name: make(receipts[1]) for name, make in change.items()})
    outcome = outcome_of(tiny_artifact, [receipts[0], forged, receipts[2]])
    assert list(outcome.differences) == [2]


def test_a_receipt_that_was_aborted_is_compared_so_far(
    tiny_artifact: Artifact, receipts: list[Receipt]
) -> None:
    whole = receipts[0]
    chain_end = computed(tiny_artifact, whole, 7)
    cut = replace(
        whole,
        output_ids=whole.output_ids[:7],
        marks=to_text(from_text(whole.marks)[:7]),
        finish=FinishReason.ABORT,
        logits=chain_end,
    )
    assert outcome_of(tiny_artifact, [cut]).differences == {}


def computed(artifact: Artifact, receipt: Receipt, max_tokens: int) -> str:
    """The end of the chain after some tokens, as a forged receipt with a wrong one is told of it."""
    cut = replace(
        receipt,
        output_ids=receipt.output_ids[:max_tokens],
        marks=to_text(from_text(receipt.marks)[:max_tokens]),
        finish=FinishReason.ABORT,
    )
    [text] = outcome_of(artifact, [cut]).differences.values()
    return text.removeprefix("the digest is ").partition(",")[0]


def test_an_answer_without_tokens_is_the_same(tiny_artifact: Artifact, receipts: list[Receipt]) -> None:
    receipt = replace(receipts[0], output_ids=(), marks="", finish=FinishReason.ABORT)
    receipt = replace(receipt, logits=to_text(receipt.new_chain().end))
    for name in ("alone", "full-batch"):
        assert outcome_of(tiny_artifact, [receipt], name).differences == {}


@pytest.mark.slow
def test_another_model_is_refused_by_what_differs(
    build_tiny: BuildTiny, tiny_artifact: Artifact, receipts: list[Receipt], tmp_path: Path
) -> None:
    other = build_tiny(BuildOptions(weights="f32"))
    with pytest.raises(ReceiptError, match="receipt 1 is of another model: its artifact is"):
        outcome_of(other, receipts)
    shutil.copytree(tiny_artifact.vmfb.parent, tmp_path / "copy")
    with (tmp_path / "copy" / "tokenizer_config.json").open("a") as file:
        file.write(" ")
    with pytest.raises(ReceiptError, match="receipt 1 is of another model: its tokenizer is"):
        outcome_of(Artifact.open(tmp_path / "copy"), receipts)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"prompt_ids": ()}, ReceiptError, "none that this model can have read"),
        ({"prompt_ids": (2**31 - 1,)}, ReceiptError, "none that this model can have read"),
        ({"prompt_ids": (1,) * 5000}, ReceiptError, "none that this model can have read"),
        ({"sampling": {}}, ReceiptError, "max_tokens"),
        ({"sampling": {"max_tokens": 9, "top_p": 7.0}}, ReceiptError, "top_p"),
        (
            {"sampling": {"max_tokens": 9, "structured_outputs": {"regex": "("}}},
            InvalidRequestError,
            "regular expression cannot be used",
        ),
        (
            {"sampling": {"max_tokens": 9, "structured_outputs": {"regex": "a" * 99_999}}},
            InvalidRequestError,
            "may have at most",
        ),
    ],
)
def test_what_no_model_answered_is_refused(
    tiny_artifact: Artifact,
    receipts: list[Receipt],
    change: dict[str, Any],
    error: type[LlmError],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        outcome_of(tiny_artifact, [replace(receipts[0], **change)])


class TooSmall(Schedule):
    """Its budget has no room for what it says."""

    def mode_options(self, config: ModelConfig) -> BatchSettings:
        return BatchSettings(batch_mode="extend-attention", token_budget=1)


def test_a_schedule_that_the_model_does_not_allow_is_not_ok(
    tiny_artifact: Artifact, receipts: list[Receipt]
) -> None:
    with opened(tiny_artifact.vmfb.parent, receipts[:1]) as subject:
        outcome = replay(subject, TooSmall(name="x", mode=EXTEND))
        assert outcome.num_same == 0
        assert "a token budget of 1" in (outcome.skipped or "")
        with pytest.raises(ArtifactError, match="a token budget of 1"):
            replay(subject, TooSmall(name="x"))
