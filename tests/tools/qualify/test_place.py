"""The device, program and GPU that are tested. The compiler is faked."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from shortfin_apps.llm.artifact.program_record import Host
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.contract.host_gpu import HostGpu
from shortfin_apps.llm.tools.qualify import bench as bench_module
from shortfin_apps.llm.tools.qualify import cli, place
from shortfin_apps.llm.tools.qualify.bench import Bench
from shortfin_apps.llm.tools.qualify.place import device_ids, device_to_build, program_to_test
from tests.artifact.test_several_devices import built
from tests.host_cpus import V3

OLD, NEW, OTHER = HostGpu("hip", "gfx1100"), HostGpu("hip", "gfx942", 1), HostGpu("hip", "gfx1201")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("place"), "hip:gfx1100,gfx942,cpu:x86-64-v3")


def have(monkeypatch: pytest.MonkeyPatch, *hosts: Host, listed: tuple[str, ...] = ()) -> None:
    """Let this machine have devices, and AMD GPUs that only the kernel lists."""
    at_hand = lambda kind: [each for each in hosts if each.kind == kind]  # noqa: E731
    monkeypatch.setattr(place, "hosts_at_hand", at_hand)
    monkeypatch.setattr(place, "amd_chips", lambda: list(listed))


@pytest.mark.parametrize(
    ("hosts", "listed", "given", "device"),
    [
        ([V3, NEW], (), None, "hip:gfx942"),
        ([V3, NEW], (), "auto", "hip:gfx942"),
        ([V3, OTHER, NEW], (), None, "hip:gfx942"),
        ([V3, OLD, NEW], (), "hip:gfx942", "hip:gfx942"),
        ([V3, OLD, NEW], (), "hip", "hip:gfx1100"),
        ([V3, NEW], (), "cpu", "cpu:x86-64-v3"),
        ([V3, OTHER], (), None, "cpu:x86-64-v3"),
        ([V3], ("gfx942",), None, "hip:gfx942"),  # the driver denies it, and the report says so
        ([V3], (), "hip:gfx942", "hip:gfx942"),
    ],
)
def test_the_program_is_the_one_that_serves_here(
    hosts: list[Host],
    listed: tuple[str, ...],
    given: str | None,
    device: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    have(monkeypatch, *hosts, listed=listed)
    assert program_to_test(folder, given)[0].target.device == device


def test_a_program_that_nothing_here_runs_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, OTHER)
    with pytest.raises(ArtifactError, match="this machine has gfx1201"):
        program_to_test(folder, None)
    with pytest.raises(ArtifactError, match="does not run its program for hip"):
        program_to_test(folder, "hip")
    with pytest.raises(ArtifactError, match=r"was built for .*; leave out `--device cuda:sm_90`"):
        program_to_test(folder, "cuda:sm_90")


def test_the_bench_opens_this_program_on_the_gpu_that_fits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    have(monkeypatch, V3, OLD, NEW)
    args = cli_arguments(str(folder), "hip:gfx942")
    plan = cli._plan(args)
    assert "a: its program for hip:gfx942, of those for hip:gfx1100,gfx942,cpu:x86" in capsys.readouterr().err
    opened = []
    monkeypatch.setattr(
        bench_module, "open_device", lambda kind, device_ids: opened.append((kind, device_ids))
    )
    bench = Bench(plan)
    assert bench.device is None
    assert opened == [("hip", ("1",))]
    assert bench.artifact.vmfb.name.endswith("gfx942.vmfb")
    assert device_ids("hip:gfx1100") == ()
    assert device_ids("cpu") == ()
    with pytest.raises(ArtifactError, match="there is hip:gfx1100, hip:gfx942"):
        device_ids("hip:gfx1201")


def cli_arguments(subject: str, device: str) -> argparse.Namespace:
    return argparse.Namespace(subject=subject, device=device, soak=0.0)


@pytest.mark.parametrize("given", [None, "auto"])
def test_this_machines_first_device_is_built_for(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(place, "device_of_this_machine", lambda: ("hip:gfx1100,gfx942", "listed there"))
    assert device_to_build(given, told.append) == "hip:gfx1100"
    assert told == ["this machine's device: hip:gfx1100,gfx942, listed there"]
