"""Launches whose workgroups wait for each other are refused where they do not all run at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from shortfin_apps.llm.components.runtime.device import EntrySignature
from shortfin_apps.llm.components.runtime.residency import check_residency
from shortfin_apps.llm.contract.errors import ArtifactError

VMFB = Path("model.vmfb")


def entry(name: str, compute_units: int | None) -> EntrySignature:
    return EntrySignature(name, None, None, compute_units=compute_units)


ENTRIES = [entry("prefill_bs1", None), entry("decode_bs1", 36), entry("decode_bs8", 80)]


@pytest.mark.parametrize("compute_units", [80, 304])
def test_a_device_with_as_many_compute_units_runs_them(compute_units: int) -> None:
    check_residency(VMFB, ENTRIES, lambda: compute_units)


@pytest.mark.parametrize(("compute_units", "has"), [(79, "has only 79"), (None, "does not report")])
def test_any_other_device_is_refused(compute_units: int | None, has: str) -> None:
    with pytest.raises(ArtifactError, match=f"80 compute units.*{has}.*--no-one-launch"):
        check_residency(VMFB, ENTRIES, lambda: compute_units)


def test_a_program_without_such_launches_does_not_ask() -> None:
    def ask() -> int:
        raise AssertionError("nothing to ask")

    check_residency(VMFB, ENTRIES[:1], ask)
