"""All checks on this CPU, and what becomes of what they raise."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

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


def test_without_a_compiler_what_must_be_built_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name == "iree.compiler" else find_spec(name, *rest)

    monkeypatch.setattr(bench_module, "find_spec", without)
    other = Bench(Plan("random:tiny", "cpu"))
    for name in ("self-test", "tokens", "receipts", "bandwidth"):
        if name != "tokens":
            outcome = run_check(BY_NAME[name], other, 60.0)
            assert outcome.status is Status.SKIPPED
            assert "run `pip install" in outcome.text


def test_optional_checks_run_if_they_are_asked_for() -> None:
    assert "soak" not in [check.name for check in chosen(None, soaks=False)]
    assert "soak" in [check.name for check in chosen(None, soaks=True)]
    assert [check.name for check in chosen(["weights"], soaks=False)] == ["machine", "weights"]
