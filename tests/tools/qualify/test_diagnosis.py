"""Each planted fault is named by its kind."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.tools.qualify.outcome import Fault, Status
from tests.conftest import BuildTiny
from tests.integration import damages
from tests.integration.test_planted_damage import OPTIONS
from tests.tools.qualify.planted import Faulty, Forgetful, Stale, Unordered, Unsteady, check_on


@pytest.fixture
def sound(build_tiny: BuildTiny) -> Artifact:
    return build_tiny(OPTIONS)


@pytest.fixture
def copy(sound: Artifact, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound.vmfb.parent, tmp_path / "tiny"))


def test_a_sound_device_passes(sound: Artifact) -> None:
    outcomes = check_on(Faulty, str(sound.vmfb.parent), "files", "self-test", "queued", "weights")
    assert [each.status for each in outcomes] == [Status.PASSED] * 4


def test_a_wrong_kernel_is_named_with_its_entry_and_layer(copy: Path) -> None:
    damages.miscompile_entry(copy)
    [outcome] = check_on(Faulty, str(copy), "self-test")
    assert outcome.fault is Fault.WRONG_KERNEL
    assert "`decode_bs4`" in outcome.text
    assert "first in layer 0" in outcome.text
    assert "computed by" in outcome.text


@pytest.mark.parametrize("after", [0, 15])
def test_stale_weights_of_the_first_load_are_named(sound: Artifact, copy: Path, after: int) -> None:
    """From the first invocation on, and from within the first of two runs of the self-test on."""
    damages.flip_weight(14)(copy)
    [wrong] = Artifact.open(copy, check_sizes=False).parameters
    [outcome] = check_on(lambda device: Stale(device, wrong, after), str(sound.vmfb.parent), "self-test")
    assert outcome.fault is Fault.STALE_WEIGHTS


def test_a_parameter_page_that_changes_later_is_named(sound: Artifact, copy: Path) -> None:
    damages.flip_weight(0)(copy)  # too little for the reference: only bits tell
    [wrong] = Artifact.open(copy, check_sizes=False).parameters
    first, then = check_on(
        lambda device: Stale(device, wrong, 30), str(sound.vmfb.parent), "self-test", "weights"
    )
    assert first.status is Status.PASSED
    assert then.fault is Fault.STALE_WEIGHTS


def test_results_that_vary_are_a_missing_wait(sound: Artifact) -> None:
    [outcome] = check_on(Unsteady, str(sound.vmfb.parent), "self-test")
    assert outcome.fault is Fault.MISSING_WAIT


def test_a_wait_missing_between_invocations_shows_only_in_queues(sound: Artifact) -> None:
    first, then = check_on(Unordered, str(sound.vmfb.parent), "self-test", "queued")
    assert first.status is Status.PASSED
    assert then.fault is Fault.MISSING_WAIT
    assert "queued one after another" in then.text


def test_an_upload_that_is_not_seen_is_stale_memory(sound: Artifact) -> None:
    [outcome] = check_on(Forgetful, str(sound.vmfb.parent), "uploads")
    assert outcome.fault is Fault.STALE_MEMORY
    assert outcome.text.startswith("upload 3 of 40")  # after two of the probes


def test_a_damaged_file_is_no_fault_of_the_device(copy: Path) -> None:
    damages.flip_weight(14)(copy)
    files, entries = check_on(Faulty, str(copy), "files", "self-test")
    assert files.fault is entries.fault is Fault.DAMAGED_FILE
    assert "model.irpa" in entries.text
