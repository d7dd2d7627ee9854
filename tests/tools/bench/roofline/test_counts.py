"""Entries of the tiny model counted on the emulated GPU, in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from emulated_gpu.control import Finding, KernelCounters, Report
from shortfin_apps.llm.components.batching.batch import Batch
from shortfin_apps.llm.contract.abi import EntryFamily
from shortfin_apps.llm.contract.errors import InvocationError
from shortfin_apps.llm.contract.gpu_code.chips import Limits
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.tools.bench.roofline.cases import Case, Plan, Work, make_batch
from shortfin_apps.llm.tools.bench.roofline.counts import Counts, KernelLaunches, count
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


PLAN = Plan(EntryFamily.DECODE, 1, 1, 5)
BATCH = make_batch(PLAN, 4)
FIRST, SECOND = Case("decode_bs1", PLAN, BATCH), Case("decode_bs2", PLAN, BATCH)
WORK = Work(num_bytes=100, flops=40)
LIMITS = Limits("a chip", bytes_per_s=10.0, flops_per_s=4.0)


KERNEL = KernelCounters(
    launches=2,
    instructions={},
    loaded_bytes=900,
    stored_bytes=900,
    loaded_lines=9,
    stored_lines=9,
    unique_loaded_bytes=100,
    unique_stored_bytes=20,
    lds_bytes=64,
    lds_conflict_cycles=7,
    matrix_operations=30,
)


class Gpu:
    """Each run is of two kernels; what came before `clear_report` does not count."""

    def __init__(self, *findings: Finding) -> None:
        self.findings = findings
        self.kernels = {"before": KERNEL}

    def clear_report(self) -> None:
        self.kernels = {}

    def report(self) -> Report:
        return Report({}, (), self.kernels, self.findings, ())

    def run(self, batch: Batch) -> None:
        self.kernels |= {"first": KERNEL, "second": replace(KERNEL, launches=1, unique_loaded_bytes=30)}


def test_the_kernels_of_one_invocation_are_summed() -> None:
    gpu: Any = Gpu()
    begun: list[str] = []
    results = count([(FIRST, WORK), (SECOND, WORK)], gpu, gpu, {}, lambda case: begun.append(case.entry))
    assert begun == ["decode_bs1", "decode_bs2"]
    expected = {"launches": 3, "num_bytes": 170, "matrix_flops": 120, "lds_conflict_cycles": 14}
    kernels = (KernelLaunches("first", 2, None), KernelLaunches("second", 1, None))
    assert results == [Counts(case, WORK, **expected, kernels=kernels) for case in (FIRST, SECOND)]
    assert results[0].waves is None


def test_waves_are_a_mean_over_the_launches_of_known_kernels() -> None:
    gpu: Any = Gpu()
    [counts] = count([(FIRST, WORK)], gpu, gpu, {"first": 8.0, "second": 2.0}, lambda case: None)
    assert counts.waves == (2 * 8 + 2) / 3
    [counts] = count([(FIRST, WORK)], gpu, gpu, {"second": 2.0}, lambda case: None)
    assert counts.waves == 2


def test_counts_are_compared_with_the_floor() -> None:
    counts = Counts(FIRST, WORK, launches=1, num_bytes=150, matrix_flops=80, lds_conflict_cycles=0)
    assert (counts.bytes_ratio, counts.matrix_ratio) == (1.5, 2.0)


@pytest.mark.parametrize(("num_bytes", "matrix_flops", "seconds"), [(150, 0, 15), (10, 80, 20), (10, 0, 10)])
def test_the_shortest_time_is_that_of_bytes_or_flops(
    num_bytes: int, matrix_flops: int, seconds: float
) -> None:
    """What matrix units do not compute, others must: no fewer FLOPs than the floor's."""
    counts = Counts(FIRST, WORK, 1, num_bytes, matrix_flops, 0)
    assert counts.shortest_s(LIMITS) == seconds


def test_counts_of_kernels_that_do_something_wrong_are_not_given() -> None:
    gpu: Any = Gpu(Finding("lds_race", "softmax", "ds_write_b32", (0, 0, 0), 1, 0, 3, 0x40, 8, 0))
    with pytest.raises(InvocationError, match=r"decode_bs1.*lds_race by softmax"):
        count([(FIRST, WORK)], gpu, gpu, {}, lambda case: None)
