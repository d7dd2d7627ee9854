from __future__ import annotations

import shlex
import sys
from collections import Counter

import pytest

from shortfin_apps.llm.artifact.advice import rebuild_command
from shortfin_apps.llm.cli import main
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.tools.inspection.entries import read_entries
from shortfin_apps.llm.tools.inspection.kernels import read_kernels, remarks
from shortfin_apps.llm.tools.inspection.subject import open_directory
from tests.conftest import BuildTiny


def test_a_build_for_a_gpu_ends_with_a_summary(
    build_tiny: BuildTiny, capsys: pytest.CaptureFixture[str]
) -> None:
    options = BuildOptions(device="hip:gfx942")
    folder = build_tiny(options).vmfb.parent
    again = rebuild_command(folder, "random:tiny", options)  # as other tests share the folder
    assert main(shlex.split(again)[1:]) == 0
    out, err = capsys.readouterr()
    assert out == f"{folder}\n"
    kernels, dispatches, more = err.splitlines()[-3:]
    code = read_kernels(folder / "model.vmfb")
    assert code is not None
    assert kernels.startswith(f"kernels: {len(code.kernels)} for gfx942, ")
    counts = Counter(remark for kernel in code.kernels for remark in remarks(kernel))
    assert counts
    for remark, count in counts.items():
        assert f"{remark.value} {count}" in kernels.partition("; remarks: ")[2]
    for entry in read_entries(open_directory(folder), code):
        assert f"{entry.name} {entry.num_dispatches}" in dispatches
    assert more == f"`shortfin-llm inspect {folder}` shows more"


def test_a_build_for_a_gpu_needs_no_summary(
    build_tiny: BuildTiny, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton is often there with PyTorch, and what reads machine code is not."""
    options = BuildOptions(device="hip:gfx942")
    folder = build_tiny(options).vmfb.parent
    monkeypatch.setitem(sys.modules, "emulated_gpu.errors", None)
    assert main(shlex.split(rebuild_command(folder, "random:tiny", options))[1:]) == 0
    out, err = capsys.readouterr()
    assert out == f"{folder}\n"
    needed = "this needs emulated_gpu: run `pip install ./emulated_gpu` in a checkout of shortfin-llm"
    assert err.splitlines()[-1] == f"no summary of the kernels: {needed}"


def test_a_build_for_a_cpu_has_none(build_tiny: BuildTiny, capsys: pytest.CaptureFixture[str]) -> None:
    folder = build_tiny(BuildOptions()).vmfb.parent
    assert main(["build", "random:tiny", "-o", str(folder)]) == 0
    assert "inspect" not in capsys.readouterr().err
