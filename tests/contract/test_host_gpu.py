"""The AMD GPUs of a machine, from copies of the kernel's list."""

from __future__ import annotations

from pathlib import Path

import pytest

from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.contract import host_gpu
from shortfin_apps.llm.contract.errors import BuildError

CPU = 0


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host_gpu, "NODES", tmp_path)
    return tmp_path


def fill(nodes: Path, *versions: int) -> None:
    for number, version in enumerate(versions):
        (nodes / str(number)).mkdir()
        text = f"cpu_cores_count 8\ngfx_target_version {version}\nvendor_id 4098\n"
        (nodes / str(number) / "properties").write_text(text)


@pytest.mark.parametrize(
    ("version", "chip"),
    [(90010, "gfx90a"), (90402, "gfx942"), (110000, "gfx1100"), (110501, "gfx1151"), (120001, "gfx1201")],
)
def test_a_build_is_for_the_machines_chip(nodes: Path, version: int, chip: str) -> None:
    fill(nodes, CPU, version, version)
    target = resolve_target("hip")
    assert (target.device, target.cpu) == (f"hip:{chip}", chip)


def test_a_chip_that_is_not_supported_is_refused(nodes: Path) -> None:
    fill(nodes, CPU, 100300)
    with pytest.raises(BuildError, match=r"unknown AMD chip 'gfx1030'\. The chips to build for are"):
        resolve_target("hip")


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ((), r"no AMD GPU in .*: give the chip to build for, as in --device hip:gfx942"),
        ((CPU,), "no AMD GPU in"),
        (
            (110501, 110000),
            "this machine has gfx1100 and gfx1151: give the chip to build for, as in --device",
        ),
    ],
)
def test_without_a_single_chip_it_must_be_named(nodes: Path, versions: tuple[int, ...], reason: str) -> None:
    fill(nodes, *versions)
    with pytest.raises(BuildError, match=reason):
        resolve_target("hip")


def test_a_node_that_cannot_be_read_is_left_out(nodes: Path) -> None:
    fill(nodes, 90402)
    (nodes / "hidden" / "properties").mkdir(parents=True)
    assert resolve_target("hip").cpu == "gfx942"
