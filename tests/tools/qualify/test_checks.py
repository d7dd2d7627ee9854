"""All checks on this CPU, and what becomes of what they raise."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.runtime.device import Device
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.tools.qualify import bench as bench_module
from shortfin_apps.llm.tools.qualify.bench import Bench, Plan
from shortfin_apps.llm.tools.qualify.check import Check
from shortfin_apps.llm.tools.qualify.checks import BY_NAME, CHECKS, chosen, run_check
from shortfin_apps.llm.tools.qualify.outcome import Failed, Fault, Passed, Skipped, Status


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = Bench(Plan("random:tiny", "cpu", soak_minutes=0.01))
    yield made
    made.close()


def test_all_pass_on_this_cpu_but_those_for_gpus(bench: Bench) -> None:
    outcomes = [run_check(check, bench, 60.0) for check in CHECKS]
    assert [(each.name, each.text) for each in outcomes if each.status is Status.FAILED] == []
    assert {each.name for each in outcomes if each.status is Status.SKIPPED} == {"tokens", "emulator"}
    receipts = next(each for each in outcomes if each.name == "receipts")
    assert receipts.figures["preemptions"] > 0
    soak = next(each for each in outcomes if each.name == "soak")
    assert soak.figures["requests"]["answer"] > 0


def raising(error: Exception) -> Check:
    def run(bench: Bench) -> Passed:
        raise error

    return Check("x", "", run)


@pytest.mark.parametrize(
    ("error", "status", "fault", "text"),
    [
        (Skipped("needs a GPU"), Status.SKIPPED, None, "needs a GPU"),
        (Failed(Fault.LOST_PAGES, "3 pages"), Status.FAILED, Fault.LOST_PAGES, "3 pages"),
        (ValueError("oh"), Status.FAILED, None, "ValueError: oh"),
    ],
)
def test_what_a_check_raises_is_its_outcome(
    bench: Bench, error: Exception, status: Status, fault: Fault | None, text: str
) -> None:
    outcome = run_check(raising(error), bench, 60.0)
    assert (outcome.status, outcome.fault, outcome.text) == (status, fault, text)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name == "iree.compiler" else find_spec(name, *rest)

    monkeypatch.setattr(bench_module, "find_spec", without)


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_what_must_be_built_is_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_artifact: Artifact
) -> None:
    monkeypatch.setenv("SHORTFIN_LLM_CACHE", str(tmp_path))
    bench = Bench(Plan("random:tiny", "cpu"))
    for name in ("self-test", "receipts", "bandwidth"):
        outcome = run_check(BY_NAME[name], bench, 60.0)
        assert outcome.status is Status.SKIPPED
        assert "run `pip install" in outcome.text
    bench = Bench(Plan(str(tiny_artifact.vmfb.parent), "cpu"))
    for name in ("build", "self-test", "leave", "pages"):
        outcome = run_check(BY_NAME[name], bench, 60.0)
        assert (outcome.status, outcome.fault) == (Status.PASSED, None), outcome.text
    bench.close()


def test_without_a_compiler_a_cache_is_used(bench: Bench, request: pytest.FixtureRequest) -> None:
    cached = bench.exact_on_cpu
    request.getfixturevalue("no_compiler")
    assert Bench(Plan("random:tiny", "cpu")).exact_on_cpu.vmfb == cached.vmfb


def test_no_check_needs_a_compiler_to_be_listed() -> None:
    program = """
import importlib.metadata as metadata, sys
version = metadata.version
def without_compiler(name):
    if name == "iree-base-compiler":
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = without_compiler
sys.modules["iree.compiler"] = None
import shortfin_apps.llm.tools.qualify.checks, shortfin_apps.llm.tools.qualify.worker
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_needs_a_device_that_does_not_open_is_skipped() -> None:
    def broken(kind: str) -> Device:
        raise ArtifactError("no driver")

    bench = Bench(Plan("random:tiny", "cpu"), broken)
    outcomes = [run_check(BY_NAME[name], bench, 60.0) for name in ("device", "self-test", "abort", "W1")]
    assert outcomes[0].text == "ArtifactError: no driver"
    assert [(each.status, each.text) for each in outcomes[1:]] == 3 * [
        (Status.SKIPPED, "needs the device, which failed above")
    ]


def test_optional_checks_run_if_they_are_asked_for() -> None:
    assert "soak" not in [check.name for check in chosen(None, soaks=False)]
    assert "soak" in [check.name for check in chosen(None, soaks=True)]
    assert [check.name for check in chosen(["weights"], soaks=False)] == ["machine", "weights"]
