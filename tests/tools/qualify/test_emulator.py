"""Findings of an emulated GPU are failures."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from emulated_gpu.control import Control, Finding, Misuse
from shortfin_apps.llm.tools.qualify import emulator
from shortfin_apps.llm.tools.qualify.bench import Bench, Plan
from shortfin_apps.llm.tools.qualify.outcome import Failed, Fault

MISUSE = Misuse("free", "memory in use was freed", 0, 0)


def finding(kind: str) -> Finding:
    return Finding(kind, "attend", "v_add_f32", (0, 0, 0), 0, 0, 0, 0x1A0, 0, 0)


@pytest.mark.parametrize(
    ("findings", "misuses", "fault", "text"),
    [
        ([finding("missing_wait")], [], Fault.MISSING_WAIT, "missing_wait in attend: v_add_f32 at 0x1a0"),
        ([finding("lds_race")], [], Fault.EMULATOR, "lds_race in attend"),
        ([], [MISUSE], Fault.EMULATOR, "free: memory in use was freed"),
    ],
)
def test_a_finding_is_named(
    findings: list[Finding],
    misuses: list[Misuse],
    fault: Fault,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    report = SimpleNamespace(findings=findings, misuses=misuses, kernels={})
    monkeypatch.setattr(Bench, "is_emulated", True)
    monkeypatch.setattr(Control, "__init__", lambda self, library: None)
    monkeypatch.setattr(Control, "report", lambda self: report)
    monkeypatch.setattr(emulator, "loaded_library", lambda name: SimpleNamespace(_name="libamdhip64.so"))
    with pytest.raises(Failed, match=text) as caught:
        emulator.findings(Bench(Plan("random:tiny", "cpu")))
    assert caught.value.fault is fault
