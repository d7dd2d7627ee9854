from __future__ import annotations

import threading
import time
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
from shortfin_apps.llm.tools.bench.roofline.profile import (
    OUTSIDE,
    PERIOD_NS,
    CodeMap,
    Function,
    Sampler,
    load_code_map,
    profile,
    sampling,
    shares,
)


def test_there_is_one_sample_per_period() -> None:
    try:
        with sampling() as addresses:
            begin = time.process_time_ns()
            while time.process_time_ns() - begin < 400 * PERIOD_NS:
                pass
    except InvalidRequestError as error:
        pytest.skip(str(error))
    assert 300 < len(addresses) < 600
    assert all(addresses)


def test_an_idle_process_has_almost_no_samples() -> None:
    """Opening and closing takes time itself, the more the more threads other tests have left."""
    begin_ns = time.process_time_ns()
    try:
        with sampling() as addresses:
            pass
    except InvalidRequestError as error:
        pytest.skip(str(error))
    assert len(addresses) < 50 + (time.process_time_ns() - begin_ns) / PERIOD_NS


def test_an_ended_thread_is_not_a_permission_error() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert thread.native_id is not None
    try:
        with sampling():
            pass
    except InvalidRequestError as error:
        pytest.skip(str(error))
    with pytest.raises(ProcessLookupError):
        Sampler().open(thread.native_id)


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
