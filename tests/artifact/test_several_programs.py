"""Opening, verifying and serving from an artefact for several kinds of CPU."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from shortfin_apps.llm.artifact import artifact as artifact_module
from shortfin_apps.llm.artifact import file_names
from shortfin_apps.llm.artifact.artifact import Artifact, Manifest
from shortfin_apps.llm.artifact.verification import verifying
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.contract.host_cpu import HostCpu
from shortfin_apps.llm.model.spec import BuildOptions
from tests.conftest import BuildTiny
from tests.host_cpus import ARM, V2, V3, V3_FEATURES, V4

pytestmark = pytest.mark.slow

OPTIONS = BuildOptions(
    device="cpu:x86-64-v3,x86-64-v4,znver4", prefill_batch_sizes=(1,), decode_batch_sizes=(1,)
)


@pytest.fixture
def folder(build_tiny: BuildTiny, tmp_path: Path) -> Path:
    """A copy of an artefact that a test may change."""
    return Path(shutil.copytree(build_tiny(OPTIONS).vmfb.parent, tmp_path / "artefact"))


def chosen(folder: Path, host: HostCpu) -> tuple[str, str]:
    artifact = Artifact.open(folder, host=host)
    assert artifact.manifest is not None
    return artifact.manifest.program.target.name, artifact.parameters[0].name


def test_a_cpu_takes_the_best_program_that_it_can_execute(folder: Path) -> None:
    zen4 = {"avx512_bf16", "avx512_bitalg", "avx512ifma", "avx512vbmi", "avx512_vbmi2", "avx512_vnni"}
    zen4 |= {"avx512_vpopcntdq", "gfni", "vaes"}
    assert chosen(folder, V3) == ("x86-64-v3", "model.x86-64-v4.irpa")
    assert chosen(folder, V4) == ("x86-64-v4", "model.x86-64-v4.irpa")
    assert chosen(folder, HostCpu("x86_64", V4.features | zen4)) == ("znver4", "model.znver4.irpa")


def test_the_manifest_is_that_of_the_program(folder: Path) -> None:
    manifest = Artifact.open(folder, host=V3).manifest
    assert manifest is not None
    assert manifest.program.kernels == manifest.programs[2].kernels
    assert manifest.program.compile_flags == manifest.programs[2].compile_flags
    assert manifest.program.target.cpu == "x86-64-v3"
    assert [each.target.name for each in manifest.programs] == ["znver4", "x86-64-v4", "x86-64-v3"]


def test_the_choice_is_told_with_the_reasons(folder: Path) -> None:
    choice = Artifact.open(folder, host=V4).choice
    assert choice is not None
    assert choice.startswith("the program for x86-64-v4 suits this CPU best; znver4 needs avx512bf16, ")
    assert choice.endswith("; x86-64-v3 uses less of it")
    assert "\n" not in choice


def test_a_cpu_that_runs_none_is_told_what_it_lacks_and_what_to_build(folder: Path) -> None:
    with pytest.raises(ArtifactError) as refused:
        Artifact.open(folder, host=V2)
    message = str(refused.value)
    assert "x86-64-v3 needs avx2, bmi, bmi2, f16c, fma, lzcnt, movbe;" in message
    assert "x86-64-v4 needs avx2, avx512bw, " in message
    assert f"build random:tiny -o {folder} " in message
    assert "--device cpu:znver4,x86-64-v4,x86-64-v3,host" in message
    assert "\n" not in message


def test_a_cpu_of_another_architecture_is_told_so(folder: Path) -> None:
    with pytest.raises(ArtifactError, match=r"another architecture \(x86_64\); rebuild it here with `short"):
        Artifact.open(folder, host=ARM)


def test_a_program_for_one_cpu_is_refused_by_name(build_tiny: BuildTiny) -> None:
    folder = build_tiny(replace(OPTIONS, device="cpu:x86-64-v4")).vmfb.parent
    missing = "avx512bw, avx512cd, avx512dq, avx512f, avx512vl"
    with pytest.raises(
        ArtifactError, match=rf"compiled for a CPU \(x86-64-v4\) with {missing}, which .* `sho"
    ):
        Artifact.open(folder, host=V3)
    assert Artifact.open(folder, host=V4).choice is None


def test_a_program_is_opened_by_name_on_any_host(folder: Path) -> None:
    opened = Artifact.open(folder, for_this_host=False, name="x86-64-v3")
    assert opened.vmfb.name == "model.x86-64-v3.vmfb"
    assert Artifact.open(folder, for_this_host=False).vmfb.name == "model.znver4.vmfb"
    with pytest.raises(ArtifactError, match="has no program for haswell; it was built for znver4, x86-64-v4"):
        Artifact.open(folder, for_this_host=False, name="haswell")


def verify(folder: Path, host: HostCpu) -> None:
    with verifying(Artifact.open(folder, host=host), "hash") as confirm:
        confirm()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.znver4.vmfb", "model.znver4.irpa", "model.x86-64-v4.vmfb"])
def test_damage_to_what_is_for_other_cpus_does_not_matter(
    folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    flip(folder / name)
    verify(folder, V3)
    assert name not in caplog.text
    (folder / name).write_bytes(b"short")
    verify(folder, V3)
    assert f"{name} has 5 bytes instead of" in caplog.text
    (folder / name).unlink()
    caplog.clear()
    verify(folder, V3)
    assert f"{name} is missing; it is for another device" in caplog.text


@pytest.mark.parametrize("name", ["model.x86-64-v3.vmfb", "model.x86-64-v4.irpa", "tokenizer.json"])
def test_damage_to_what_is_used_is_refused(folder: Path, name: str) -> None:
    whole = (folder / name).read_bytes()
    flip(folder / name)
    with pytest.raises(ArtifactError, match=rf"{name}: has another content"):
        verify(folder, V3)
    if name != file_names.TOKENIZER:
        (folder / name).write_bytes(whole[:-1])
        with pytest.raises(ArtifactError, match=rf"{name}: its size differs"):
            Artifact.open(folder, host=V3)
    (folder / name).unlink()
    with pytest.raises(ArtifactError, match=rf"{name}: no such file"):
        Artifact.open(folder, host=V3)


def from_files(folder: Path, vmfb: str, parameters: str) -> Artifact:
    return Artifact.from_files(
        vmfb=folder / vmfb,
        parameters=(folder / parameters,),
        model_config=folder / file_names.CONFIG,
        tokenizer_json=folder / file_names.TOKENIZER,
    )


def test_the_files_of_a_program_may_be_given_one_by_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifact_module, "this_host", lambda: V3)
    opened = from_files(folder, "model.x86-64-v3.vmfb", "model.x86-64-v4.irpa")
    assert opened.manifest is not None
    assert opened.manifest.program.target.name == "x86-64-v3"
    with pytest.raises(ArtifactError, match=r"compiled for a CPU \(x86-64-v4\) with avx512bw"):
        from_files(folder, "model.x86-64-v4.vmfb", "model.x86-64-v4.irpa")


def test_the_parameters_of_another_cpu_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The archives have equal sizes, so nothing else would notice."""
    monkeypatch.setattr(artifact_module, "this_host", lambda: V3)
    with pytest.raises(
        ArtifactError, match=r"another device than model\.x86-64-v3\.vmfb; give .*x86-64-v4\.irpa"
    ):
        from_files(folder, "model.x86-64-v3.vmfb", "model.znver4.irpa")


def test_a_manifest_that_names_other_files_is_refused(folder: Path) -> None:
    path = folder / file_names.MANIFEST
    manifest = json.loads(path.read_text())
    manifest["programs"][1]["vmfb"] = "../model.vmfb"
    path.write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match=r"`programs\.1\.vmfb`: .*rebuild"):
        Manifest.load(path)


def test_nothing_is_told_of_an_artefact_for_one_cpu(
    build_tiny: BuildTiny, caplog: pytest.LogCaptureFixture
) -> None:
    folder = build_tiny(replace(OPTIONS, device="cpu:x86-64-v3")).vmfb.parent
    with caplog.at_level(logging.INFO):
        assert Artifact.open(folder, host=HostCpu("x86_64", V3_FEATURES)).choice is None
    assert caplog.text == ""
