from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from bench.gpu import worker
from bench.gpu.drafting import ROUNDS
from bench.gpu.models import MODELS, Model
from bench.gpu.pack import pack_model
from bench.gpu.weights import complete
from shortfin_apps.llm.components.engine.drafter import Drafter
from shortfin_apps.llm.components.speculation.pace import Pace
from shortfin_apps.llm.model.draft_layer import DraftLayer as DraftBlocks

pytestmark = pytest.mark.slow


def measured(folder: Path, monkeypatch: pytest.MonkeyPatch, parts: str) -> list[dict[str, Any]]:
    """Measure random:tiny with a draft layer on this CPU."""
    spec = replace(MODELS["random-tiny"].spec, draft=DraftBlocks(blocks=MODELS["random-tiny"].spec.layers[0]))
    model = replace(MODELS["random-tiny"], is_timed=True, spec=spec).for_device("cpu")
    monkeypatch.setitem(cast(dict[str, Model], MODELS), "drafting", model)
    pack_model(model, folder / "packed")
    complete(folder / "packed", folder / "whole")
    results = folder / "results.jsonl"
    command = [parts, str(folder), "drafting", str(folder / "whole"), "--results", str(results)]
    assert worker.main([*command, "--device", "cpu", "--sample-seconds", "0.01"]) == 0
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]


def test_most_drafts_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a round takes as long as a decode, as here, engines would draft nothing, or soon stop."""
    monkeypatch.setattr(Pace, "_change", lambda self, proposes, is_trial: None)
    monkeypatch.setattr(Drafter, "num_worth", lambda self, request, least, most: max(0, min(most, 3)))
    records = [each for each in measured(tmp_path, monkeypatch, "drafts") if each["part"] == "drafts"]
    assert [(each["rounds"], each["requests"]) for each in records] == [
        (rounds, requests) for rounds in ROUNDS for requests in (1, 8)
    ]
    speculating = [each for each in records if each["rounds"] != "off"]
    assert all(each["accepted"] > 0.5 * each["proposed"] > 0 for each in speculating)
    steps = {(each["rounds"], each["requests"]): each["steps"] for each in records}
    assert max(steps["ahead", 8], steps["in step", 8]) < steps["off", 8] / 2


def test_draft_entries_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [each for each in measured(tmp_path, monkeypatch, "entries") if each["part"] == "entries"]
    names = [each["entry"] for each in records if each["entry"].startswith("draft")]
    assert names == ["draft_bs1", "draft_bs8"]
