"""`shortfin-llm inspect` as a user calls it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from emulated_gpu.chips import BY_NUMBER, CHIPS
from emulated_gpu.machine_code import code_object
from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.cli import main
from shortfin_apps.llm.model.spec import BuildOptions
from tests.conftest import BuildTiny
from tests.partial_copy import LEFT_OUT, add_missing_gpu

KERNEL_KEYS = {
    *("name", "operation", "workgroup", "lanes", "num_vgprs", "num_agprs", "num_sgprs", "num_vgpr_spills"),
    *("num_sgpr_spills", "lds_bytes", "scratch_bytes", "num_instructions", "num_matrix_instructions"),
    *("loads", "waves", "widest_load", "commonest_load", "remarks"),
}
KEYS = {
    *(
        "schema",
        "version",
        "model",
        "vmfb",
        "source",
        "built_with",
        "target",
        "batch_invariant",
        "weights",
        "operations",
        "top_k",
    ),
    *(
        "programs",
        "program_bytes",
        "parameters",
        "cache",
        "entry_bytes",
        "entries",
        "chip",
        "kernels",
        "notes",
    ),
}


LOOSE_WITH_PROGRAM = ["--vmfb", "model.vmfb", "--model-config", "config.json", "--program", "haswell"]


@pytest.fixture
def gpu_artifact(build_tiny: BuildTiny) -> Artifact:
    return build_tiny(BuildOptions(device="hip:gfx942"))


def document(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["inspect", *argv, "--json", "-"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_json_of_a_program_for_a_gpu(gpu_artifact: Artifact, capsys: pytest.CaptureFixture[str]) -> None:
    doc = document(capsys, str(gpu_artifact.vmfb.parent))
    assert set(doc) == KEYS
    assert doc["schema"] == "shortfin-llm-inspect/3"
    assert doc["chip"] == "gfx942"
    assert doc["target"]["device"] == "hip:gfx942"
    assert doc["weights"] == "bf16"
    assert doc["batch_invariant"]
    assert doc["program_bytes"] == gpu_artifact.vmfb.stat().st_size
    assert doc["cache"] == {
        "type": "bfloat16",
        "bytes_per_token": 256,
        "window_tokens": None,
        "page_tokens": 16,
        "page_bytes": 4096,
        "pages": 513,
        "context_tokens": 1024,
    }
    assert {group["type"] for group in doc["parameters"]} == {"bf16", "f32"}
    assert all(set(kernel) == KERNEL_KEYS for kernel in doc["kernels"])
    names = {kernel["name"] for kernel in doc["kernels"]}
    assert all(set(entry["launches"]) <= names for entry in doc["entries"])


def test_parameters_by_type_add_up(tiny_artifact: Artifact, capsys: pytest.CaptureFixture[str]) -> None:
    doc = document(capsys, str(tiny_artifact.vmfb.parent))
    stored = sum(group["bytes"] for group in doc["parameters"])
    file_bytes = tiny_artifact.parameters[0].stat().st_size
    assert 0.9 * file_bytes < stored < file_bytes  # the rest are names and padding
    assert (doc["chip"], doc["kernels"]) == (None, [])


@pytest.fixture
def several(build_tiny: BuildTiny) -> Path:
    device = "cpu:x86-64-v3,x86-64-v4,znver4"
    options = BuildOptions(device=device, prefill_batch_sizes=(1,), decode_batch_sizes=(1,))
    return build_tiny(options).vmfb.parent


@pytest.mark.slow
def test_the_programs_for_several_cpus(several: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = document(capsys, str(several))
    assert set(first) == KEYS
    assert [each["name"] for each in first["programs"]] == ["znver4", "x86-64-v4", "x86-64-v3"]
    for each in first["programs"]:
        doc = document(capsys, str(several), "--program", each["name"])
        assert doc["programs"] == first["programs"]
        assert (doc["target"]["cpu"], Path(doc["vmfb"]).name) == (each["name"], each["vmfb"])
        assert each["bytes"] == {
            each[name]: (several / each[name]).stat().st_size for name in ("vmfb", "parameters")
        }
        assert doc["program_bytes"] == each["bytes"][each["vmfb"]]
        assert {group["type"] for group in doc["parameters"]} == {"bf16", "f32"}


@pytest.mark.slow
def test_the_tables_list_the_programs(several: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(several), "--program", "x86-64-v4"]) == 0
    out = capsys.readouterr().out
    assert "cpu:x86-64-v4 (x86_64, x86-64-v4)" in out
    assert "x86-64-v3: model.x86-64-v3.vmfb " in out
    assert main(["inspect", str(several), "--program", "haswell"]) == 2
    assert "no program for haswell; it was built for znver4, x86-64-v4, x86-64-v3" in capsys.readouterr().err


def test_loose_files_tell_the_same_program(
    gpu_artifact: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = gpu_artifact.vmfb.parent
    whole = document(capsys, str(folder))
    loose = document(
        capsys, "--vmfb", str(folder / "model.vmfb"), "--model-config", str(folder / "config.json")
    )
    assert loose["kernels"] == whole["kernels"]
    assert loose["entries"] == whole["entries"]
    assert loose["cache"] == whole["cache"]
    assert (loose["parameters"], loose["target"], loose["source"]) == ([], None, None)


def test_one_entry_with_the_kernels_that_it_launches(
    gpu_artifact: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    doc = document(capsys, str(gpu_artifact.vmfb.parent), "--entry", "decode_bs4")
    (entry,) = doc["entries"]
    assert entry["name"] == "decode_bs4"
    assert {kernel["name"] for kernel in doc["kernels"]} == set(entry["launches"])


def test_the_tables_fit_a_pipe(gpu_artifact: Artifact, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(gpu_artifact.vmfb.parent), "--all"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "…" not in out
    assert "kernels for gfx942" in out


def test_the_kernels_of_an_unknown_chip_are_left_out(
    gpu_artifact: Artifact, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {number: chip for number, chip in BY_NUMBER.items() if number != CHIPS["gfx942"].number}
    monkeypatch.setattr(code_object, "BY_NUMBER", others)
    doc = document(capsys, str(gpu_artifact.vmfb.parent))
    assert doc["kernels"] == []
    assert "number 0x4c; known are " in doc["notes"][0]
    assert all(entry["num_dispatches"] for entry in doc["entries"])


def test_an_unknown_entry_is_named(tiny_artifact: Artifact, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tiny_artifact.vmfb.parent), "--entry", "verify"]) == 2
    assert "no entry matches verify; there are decode_bs1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [[], ["--vmfb", "model.vmfb"], ["dir", "--vmfb", "model.vmfb"], LOOSE_WITH_PROGRAM]
)
def test_what_to_inspect_has_to_be_named(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", *argv]) == 2
    assert "name an artefact's directory" in capsys.readouterr().err


def test_other_directories_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path)]) == 2
    assert "not an artefact" in capsys.readouterr().err


def test_a_damaged_program_is_refused(
    tiny_artifact: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "model.vmfb"
    content = bytearray(tiny_artifact.vmfb.read_bytes())
    content[len(content) // 2] ^= 0xFF
    damaged.write_bytes(content)
    config = str(tiny_artifact.vmfb.with_name("config.json"))
    assert main(["inspect", "--vmfb", str(damaged), "--model-config", config]) == 2
    assert "the VMFB is damaged" in capsys.readouterr().err


def test_a_manifest_with_more_layers_than_parameters_is_refused(
    tiny_artifact: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = shutil.copytree(tiny_artifact.vmfb.parent, tmp_path / "other")
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["spec"]["layers"] *= 500
    (directory / "manifest.json").write_text(json.dumps(manifest))
    assert main(["inspect", str(directory)]) == 2
    message = "the manifest's model has 1000 layers, but the parameters"
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_of_a_copy_the_first_program_that_is_there_is_shown(
    tiny_artifact: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = Path(shutil.copytree(tiny_artifact.vmfb.parent, tmp_path / "copy"))
    add_missing_gpu(directory)
    doc = document(capsys, str(directory))
    assert (doc["target"]["device"], doc["vmfb"]) == ("cpu", str(directory / "model.vmfb"))
    assert [each["name"] for each in doc["programs"]] == ["gfx942", "host"]
    assert doc["notes"] == [f"missing, for other programs than this one: {', '.join(LEFT_OUT)}"]
    assert main(["inspect", str(directory), "--program", "gfx942"]) == 2
    assert "model.gfx942.vmfb: no such file" in capsys.readouterr().err


def test_a_missing_program_is_named(
    tiny_artifact: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(tiny_artifact.vmfb.with_name("config.json"))
    assert main(["inspect", "--vmfb", str(tmp_path / "no.vmfb"), "--model-config", config]) == 2
    assert "no.vmfb: cannot be read (No such file" in capsys.readouterr().err
