from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.request.messages import ChosenLogit, FinishReason
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.serving.receipts.draft import ReceiptDraft, ReceiptOrder, identity_of
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


@pytest.fixture
def copied(tiny_artifact: Artifact, tmp_path: Path) -> Artifact:
    shutil.copytree(tiny_artifact.vmfb.parent, tmp_path / "copy")
    return Artifact.open(tmp_path / "copy")


def test_a_copy_is_the_same(tiny_artifact: Artifact, copied: Artifact) -> None:
    assert identity_of(copied) == identity_of(tiny_artifact) is not None


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("config.json", "artifact"),
        ("tokenizer.json", "tokenizer"),
        ("tokenizer_config.json", "tokenizer"),
        ("generation_config.json", "tokenizer"),
    ],
)
def test_an_edited_text_makes_another(copied: Artifact, name: str, changed: str) -> None:
    """They may be edited after the build, so their content counts, and not the manifest's record."""
    before = identity_of(copied)
    with (copied.vmfb.parent / name).open("a") as file:
        file.write("\n")
    after = identity_of(copied)
    assert before is not None
    assert after is not None
    assert (before.artifact != after.artifact, before.tokenizer != after.tokenizer) == (
        changed == "artifact",
        changed == "tokenizer",
    )


@pytest.mark.parametrize("index", [0, 1])
def test_another_program_or_parameters_make_another(copied: Artifact, index: int) -> None:
    manifest = copied.manifest
    assert manifest is not None
    name = (copied.vmfb, *copied.parameters)[index].name
    files = manifest.files | {name: replace(manifest.files[name], sha256="0" * 64)}
    other = identity_of(replace(copied, manifest=replace(manifest, files=files)))
    assert other is not None
    assert other != identity_of(copied)


def test_loose_files_have_none(copied: Artifact) -> None:
    assert identity_of(replace(copied, is_loose=True)) is None
    assert identity_of(replace(copied, manifest=None)) is None


def test_a_missing_file_is_named(copied: Artifact) -> None:
    copied.tokenizer.unlink()
    with pytest.raises(ArtifactError, match=r"tokenizer\.json: cannot be read"):
        identity_of(copied)
