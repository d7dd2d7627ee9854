from __future__ import annotations

import zipfile
from collections import Counter
from pathlib import Path

import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.components.invocation.page_table import make_runner
from shortfin_apps.llm.components.runtime.open import open_device
from shortfin_apps.llm.contract.abi import EntryFamily
from shortfin_apps.llm.contract.errors import InvalidRequestError
from shortfin_apps.llm.tools.bench.roofline.cases import Plan, make_batch
from shortfin_apps.llm.tools.bench.roofline.perf_events import PERIOD_NS
from shortfin_apps.llm.tools.bench.roofline.profile import (
    OUTSIDE,
    CodeMap,
    Function,
    load_code_map,
    profile,
    shares,
)


def test_an_address_maps_to_its_dispatch() -> None:
    """Works for every copy of the program in the process."""
    code = CodeMap([Function("second", 200, 250), Function("first", 100, 200)], bases=[0x9000, 0x1000])
    for base in (0x1000, 0x9000):
        found = [code.name_of(base + offset) for offset in (99, 100, 199, 200, 249, 250)]
        assert found == [OUTSIDE, "first", "first", "second", "second", OUTSIDE]


def test_shares_are_of_all_samples_and_times_of_one_run() -> None:
    found = shares(Counter({"small": 10, "large": 30}), runs=5)
    assert [(s.name, s.share) for s in found] == [("large", 0.75), ("small", 0.25)]
    assert found[0].cpu_s == pytest.approx(30 * PERIOD_NS / 1e9 / 5)


@pytest.mark.parametrize("copy", [0, 1])
def test_a_profile_of_a_running_model_shows_its_kernels(tiny_artifact: Artifact, copy: int) -> None:
    """Works whichever copy runs, if the process has loaded the program before."""
    config = tiny_artifact.config
    device = open_device()
    loaded = [
        device.load_program(tiny_artifact.vmfb, tiny_artifact.parameters, config.module_name)
        for _ in range(2)
    ]
    batch = make_batch(Plan(EntryFamily.PREFILL, 1, 64, 64), config.stride)
    runner = make_runner(device, loaded[copy], config, 64)
    try:
        found = profile(runner, batch, load_code_map(tiny_artifact.vmfb))
    except InvalidRequestError as error:
        pytest.skip(str(error))
    names = {share.name for share in found}
    assert any(name.startswith("matmul") for name in names)
    assert any("attention" in name for name in names)
    assert sum(share.share for share in found) == pytest.approx(1)
    assert all("prefill_bs4" not in name for name in names)


def test_a_program_without_machine_code_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "gpu.vmfb", "w") as archive:
        archive.writestr("module.fb", b"")
    with pytest.raises(InvalidRequestError, match="programs for CPUs"):
        load_code_map(tmp_path / "gpu.vmfb")
