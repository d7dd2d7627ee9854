"""`qualify` on an emulated GPU, and faults that it names there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shortfin_apps.llm.contract.gpu_code.chips import CHIPS
from shortfin_apps.llm.tools.qualify import speeds
from shortfin_apps.llm.tools.qualify.bench import Bench, Plan
from shortfin_apps.llm.tools.qualify.checks import BY_NAME, run_check
from shortfin_apps.llm.tools.qualify.outcome import Fault, Outcome, Status
from tests.hip import EmulatedGpus
from tests.tools.qualify.planted import Unordered, check_on

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(300)]

CHIP = "gfx1151"
DEVICE = f"hip:{CHIP}"
CHECKED = (
    "machine",
    "device",
    "build",
    "files",
    "self-test",
    "self-test-f32",
    "queued",
    "uploads",
    "weights",
    "tokens",
    "abort",
)
TIMED = ("bandwidth", "matmul", "roofline", "W1", "W2", "W3")


@pytest.fixture
def bench(emulated_gpus: EmulatedGpus) -> Iterator[Bench]:
    with emulated_gpus.watch(CHIP):
        made = Bench(Plan("random:tiny", DEVICE))
        yield made
        made.close()


def outcomes(bench: Bench, *names: str) -> list[Outcome]:
    return [run_check(BY_NAME[name], bench, 120.0) for name in names]


def test_a_sound_gpu_passes_and_is_not_timed(bench: Bench) -> None:
    found = outcomes(bench, *CHECKED, "emulator")
    assert [(each.name, each.text) for each in found if each.status is not Status.PASSED] == []
    assert found[0].text.startswith(CHIP)
    assert found[0].figures["chip"]["units"] == CHIPS[CHIP].units
    tokens = next(each for each in found if each.name == "tokens")
    assert tokens.figures["preemptions"] > 0
    assert {each.status for each in outcomes(bench, *TIMED)} == {Status.SKIPPED}


def test_a_clock_far_below_the_chips_row_is_named(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """An emulated GPU that is taken for a real one is one."""
    monkeypatch.setattr(Bench, "is_emulated", False)
    monkeypatch.setattr(speeds, "MAX_STREAM_BYTES", 1 << 20)
    [outcome] = outcomes(bench, "bandwidth")
    assert outcome.fault is Fault.SLOW_CLOCK


def test_a_missing_wait_between_invocations_is_named(emulated_gpus: EmulatedGpus) -> None:
    with emulated_gpus.watch(CHIP):
        first, then = check_on(Unordered, "random:tiny", "self-test", "queued", device=DEVICE)
    assert first.status is Status.PASSED
    assert then.fault is Fault.MISSING_WAIT
