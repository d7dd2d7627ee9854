from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.drafting import ROUNDS
from bench.gpu.models import MODELS, Model
from bench.gpu.one_program import OneProgram
from bench.gpu.pack import pack_model
from bench.gpu.weights import complete
from bench.gpu.worker import _measure_drafts
from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.engine.draft_layer import DraftLayer
from shortfin_apps.llm.components.runtime.open import open_device
from shortfin_apps.llm.model.draft_layer import DraftLayer as DraftBlocks

pytestmark = pytest.mark.slow

TINY = MODELS["random-tiny"]
DRAFTING = replace(
    TINY, is_timed=True, spec=replace(TINY.spec, draft=DraftBlocks(blocks=TINY.spec.layers[0]))
)


def drafted(model: Model, folder: Path) -> list[dict[str, Any]]:
    pack_model(model, folder / "packed")
    complete(folder / "packed", folder / "whole")
    artifact, records = Artifact.open(folder / "whole"), list[dict[str, Any]]()
    with closing(open_device("cpu")) as device:
        _measure_drafts(model, OneProgram(device, artifact), artifact, records.append)
    return records


def test_most_drafts_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a round takes as long as a decode, as here, engines would draft nothing."""
    monkeypatch.setattr(DraftLayer, "num_worth", lambda self, request, least, most: min(most, 3))
    records = drafted(DRAFTING.for_device("cpu"), tmp_path)
    assert [(each["rounds"], each["requests"]) for each in records] == [
        (rounds, requests) for rounds in ROUNDS for requests in (1, 8)
    ]
    speculating = [each for each in records if each["rounds"] != "off"]
    assert all(each["accepted"] > 0.5 * each["proposed"] > 0 for each in speculating)
    steps = {(each["rounds"], each["requests"]): each["steps"] for each in records}
    assert steps["queued", 8] == steps["waited for", 8] < steps["off", 8] / 2
