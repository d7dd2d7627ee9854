"""Entries of the tiny model counted on the emulated GPU, in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.tools.bench.roofline.report import COUNTS_SCHEMA
from tests.conftest import BuildTiny
from tests.hip import CHIPS
from tests.runtimes import needs_shortfin


@needs_shortfin
@pytest.mark.emulated
@pytest.mark.parametrize("chip", CHIPS)
def test_an_entry_is_counted_on_its_chip(build_tiny: BuildTiny, chip: str) -> None:
    artifact = build_tiny(BuildOptions(device=f"hip:{chip}"))
    command = [sys.executable, "-m", "shortfin_apps.llm", "bench", "roofline", str(artifact.vmfb.parent)]
    command += ["--emulated", "--context", "20,256", "--entry", "decode_bs[14]", "--json", "-"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    doc = json.loads(ended.stdout)
    assert (doc["schema"], doc["chip"]) == (COUNTS_SCHEMA, chip)
    entries = doc["entries"]
    assert [(e["entry"], e["context"]) for e in entries] == [
        *(("decode_bs1", 20), ("decode_bs4", 20), ("decode_bs1", 256), ("decode_bs4", 256))
    ]
    for entry in entries:
        assert entry["launches"] > 10
        assert entry["bytes_ratio"] > 1, "every weight must be loaded"
        assert entry["shortest_s"] > entry["floor_s"] > 0
        assert 1 <= entry["waves"] <= doc["most_waves"]
        assert sum(kernel["launches"] for kernel in entry["kernels"]) == entry["launches"]
        assert all(kernel["waves"] is not None for kernel in entry["kernels"])
    assert entries[2]["bytes"] - entries[0]["bytes"] > entries[2]["floor_bytes"] - entries[0]["floor_bytes"]
