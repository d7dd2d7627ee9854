"""Artefacts for several kinds of CPU; the compiler is faked."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shortfin_apps.llm.artifact import file_names
from shortfin_apps.llm.artifact.artifact import Artifact, Manifest
from shortfin_apps.llm.builder import builder
from shortfin_apps.llm.builder.builder import build
from shortfin_apps.llm.builder.cache_contents import contents
from shortfin_apps.llm.builder.progress import PlainProgress, QuietProgress
from shortfin_apps.llm.contract.errors import ArtifactError, BuildError
from shortfin_apps.llm.model.spec import BuildOptions
from tests.builder.fake_compiler import FakeCompiler

SEVERAL = "cpu:x86-64-v3,x86-64-v4,znver4"
TEXTS = {file_names.CONFIG, *file_names.TEXTS, file_names.SELF_TEST}
FILES = {
    *("model.znver4.vmfb", "model.x86-64-v4.vmfb", "model.x86-64-v3.vmfb"),
    *("model.znver4.irpa", "model.x86-64-v4.irpa"),  # bf16 in pairs, and not
}


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCompiler:
    monkeypatch.setenv("SHORTFIN_LLM_CACHE", str(tmp_path / "cache"))
    fake = FakeCompiler()
    monkeypatch.setattr(builder, "compile_model", fake.compile_model)
    return fake


def build_tiny(out: Path, device: str = SEVERAL, *, use_cache: bool = True, top_k: int = 64) -> Artifact:
    options = BuildOptions(device=device, top_k=top_k)
    return build("random:tiny", out, options, QuietProgress(), use_cache=use_cache)


def manifest_of(artifact: Artifact) -> Manifest:
    assert artifact.manifest is not None
    return artifact.manifest


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"cache"}


@pytest.mark.parametrize("use_cache", [True, False])
def test_there_is_a_program_for_each_and_one_archive_for_each_layout(
    compiler: FakeCompiler, tmp_path: Path, use_cache: bool
) -> None:
    artifact = build_tiny(tmp_path / "a", use_cache=use_cache)
    assert names(tmp_path / "a") == FILES | TEXTS | {file_names.MANIFEST}
    assert compiler.devices == ["cpu:znver4", "cpu:x86-64-v4", "cpu:x86-64-v3"]
    manifest = manifest_of(artifact)
    assert {each.target.name: each.parameters for each in manifest.programs} == {
        "znver4": "model.znver4.irpa",
        "x86-64-v4": "model.x86-64-v4.irpa",
        "x86-64-v3": "model.x86-64-v4.irpa",
    }
    assert manifest.device == "cpu:znver4,x86-64-v4,x86-64-v3"
    assert manifest.files.keys() == manifest.file_names == FILES | TEXTS
    for each in manifest.programs:
        assert (tmp_path / "a" / each.vmfb).read_text() == f"program for {each.target.cpu}"
        assert (each.kernels, each.compile_flags[-1]) == ((f"Norm: {each.target.cpu}",), each.target.cpu)


MIXED = "cpu:x86-64-v3,x86-64-v4,hip:gfx942,gfx1100"


def build_mixed(out: Path, device: str = MIXED, **given: Any) -> Artifact:
    return build("random:tiny", out, BuildOptions.for_devices(device, **given), QuietProgress())


def test_gpus_and_cpus_have_programs_for_their_own_options(compiler: FakeCompiler, tmp_path: Path) -> None:
    artifact = build_mixed(tmp_path / "a", batch_invariant=True)
    manifest = manifest_of(artifact)
    assert manifest.device == "hip:gfx1100,gfx942,cpu:x86-64-v4,x86-64-v3"
    assert names(tmp_path / "a") == manifest.file_names | {file_names.MANIFEST}
    assert {name for name in manifest.files if name.startswith("config")} == {
        "config.hip.json",
        "config.cpu.json",
    }
    for each in manifest.programs:
        alone = build_mixed(
            tmp_path / each.target.name,
            each.target.device,
            batch_invariant=True if each.target.kind == "hip" else None,
        )
        (options,) = manifest_of(alone).all_options
        assert replace(manifest, in_use=each).options == options
        for file, same in (
            (each.vmfb, alone.vmfb),
            (each.config, alone.config_file),
            (each.parameters, alone.parameters[0]),
        ):
            assert (tmp_path / "a" / file).read_bytes() == same.read_bytes()
    assert len(compiler.devices) == len(manifest.programs)
    archives = [each.parameters for each in manifest.programs]
    assert archives == ["model.gfx1100.irpa"] * 2 + ["model.x86-64-v4.irpa"] * 2


@pytest.mark.parametrize(
    ("device", "given", "count"),
    [
        (MIXED, {}, 2),
        ("hip:gfx90a,gfx942,gfx950,gfx1100,gfx1151,gfx1201", {}, 1),
        ("hip:gfx942,gfx950", {"weights": "fp8"}, 2),  # 8-bit floats of two kinds
        ("hip:gfx1100,gfx942,cpu:x86-64-v3", {"weights": "q8_0"}, 2),
        ("hip:gfx1100,cpu:x86-64-v3,znver4", {}, 3),
    ],
)
def test_no_bytes_are_written_twice(
    compiler: FakeCompiler, tmp_path: Path, device: str, given: dict[str, Any], count: int
) -> None:
    files = manifest_of(build_mixed(tmp_path / "a", device, **given)).files
    archives = [record.sha256 for name, record in files.items() if name.endswith(".irpa")]
    assert len(archives) == count
    hashes = [record.sha256 for record in files.values()]
    assert len(set(hashes)) == len(hashes)


def test_equal_configs_are_one_file(compiler: FakeCompiler, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"decode_batch_sizes": (1, 8), "extend_sizes": (64,)}
    manifest = manifest_of(build_mixed(tmp_path / "a", **sizes))
    assert {each.config for each in manifest.programs} == {file_names.CONFIG}


def test_equal_layouts_share_one_archive(compiler: FakeCompiler, tmp_path: Path) -> None:
    build_tiny(tmp_path / "a", "cpu:x86-64-v3,x86-64-v4")
    archives = {name for name in names(tmp_path / "a") if name.endswith(".irpa")}
    assert archives == {file_names.PARAMETERS}


def test_other_layouts_of_the_same_sizes_are_not_shared(
    compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "weight_layouts", lambda spec, options, target: {"all": target.cpu})
    build_tiny(tmp_path / "a", "cpu:x86-64-v3,x86-64-v4")
    archives = {name for name in names(tmp_path / "a") if name.endswith(".irpa")}
    assert archives == {"model.x86-64-v3.irpa", "model.x86-64-v4.irpa"}


def test_parameters_are_those_of_the_cpu_alone(compiler: FakeCompiler, tmp_path: Path) -> None:
    several = build_tiny(tmp_path / "a")
    for each in manifest_of(several).programs:
        alone = build_tiny(tmp_path / each.target.name, each.target.device, use_cache=False)
        assert alone.parameters[0].read_bytes() == (tmp_path / "a" / each.parameters).read_bytes()
        assert alone.config == several.config


def test_one_cpu_has_the_files_of_one_program(compiler: FakeCompiler, tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "a", "cpu:x86-64-v3").vmfb.parent
    assert names(folder) == {*file_names.FILES, file_names.MANIFEST}
    written = json.loads((folder / file_names.MANIFEST).read_text())
    assert [each["vmfb"] for each in written["programs"]] == [file_names.VMFB]
    assert written["all_options"][0]["device"] == "cpu:x86-64-v3"
    assert compiler.devices == ["cpu:x86-64-v3"]


def test_an_artefact_of_another_version_is_built_again(compiler: FakeCompiler, tmp_path: Path) -> None:
    manifest = build_tiny(tmp_path / "a").vmfb.with_name(file_names.MANIFEST)
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format_version": 2, "spec": {}}))
    with pytest.raises(ArtifactError, match="built by another version"):
        Artifact.open(tmp_path / "a", for_this_host=False)
    assert names(build_tiny(tmp_path / "a").vmfb.parent) >= {file_names.MANIFEST}


def test_what_one_cpu_has_in_the_cache_serves_the_list(
    compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_tiny(tmp_path / "alone", "cpu:x86-64-v3")
    build_tiny(tmp_path / "host", "cpu")
    build_tiny(tmp_path / "a", "cpu:x86-64-v3,x86-64-v4,host")
    assert sorted(compiler.devices) == ["cpu", "cpu:x86-64-v3", "cpu:x86-64-v4"]
    monkeypatch.setattr(builder, "write_weights", None)  # calling it would fail
    build_tiny(tmp_path / "b", "cpu:x86-64-v4")
    build_tiny(tmp_path / "c", "cpu:host,x86-64-v4,x86-64-v3")
    assert len(compiler.devices) == 3


def test_the_order_of_the_list_does_not_matter(compiler: FakeCompiler, tmp_path: Path) -> None:
    first = build_tiny(tmp_path / "a")
    before = (tmp_path / "a" / file_names.MANIFEST).stat().st_ino
    assert build_tiny(tmp_path / "a", "cpu:znver4,x86-64-v4,x86-64-v3") == first
    assert (tmp_path / "a" / file_names.MANIFEST).stat().st_ino == before


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_build_repairs_any_file(compiler: FakeCompiler, tmp_path: Path, name: str) -> None:
    build_tiny(tmp_path / "a")
    path = tmp_path / "a" / name
    whole = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(bytes([whole[0] ^ 0xFF]) + whole[1:])
    build_tiny(tmp_path / "a")
    assert path.read_bytes() == whole
    path.unlink()
    build_tiny(tmp_path / "a")
    assert path.read_bytes() == whole
    assert len(compiler.devices) == 3


@pytest.mark.parametrize("fail_for", ["cpu:znver4", "cpu:x86-64-v4", "cpu:x86-64-v3"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), BuildError("no"), OSError(5, "bad disk")])
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_build_that_stops_leaves_things_as_they_were(
    compiler: FakeCompiler, tmp_path: Path, fail_for: str, error: BaseException, use_cache: bool
) -> None:
    build_tiny(tmp_path / "old", "cpu:x86-64-v3")
    before = (tmp_path / "old" / file_names.MANIFEST).read_bytes()
    compiler.fail_for, compiler.fail = fail_for, error
    for name in ("old", "new"):
        with pytest.raises((KeyboardInterrupt, BuildError)):
            build_tiny(tmp_path / name, top_k=5, use_cache=use_cache)
    assert names(tmp_path) == {"old"}
    assert (tmp_path / "old" / file_names.MANIFEST).read_bytes() == before
    assert not list((tmp_path / "cache").rglob("*.partial"))
    compiler.fail_for = None
    build_tiny(tmp_path / "new", top_k=5)
    assert names(tmp_path / "new") == FILES | TEXTS | {file_names.MANIFEST}


def test_an_artefact_for_several_is_replaced_by_one_for_one_and_back(
    compiler: FakeCompiler, tmp_path: Path
) -> None:
    for _ in range(2):
        build_tiny(tmp_path / "a")
        build_tiny(tmp_path / "a", "cpu:znver4")
        assert names(tmp_path / "a") == {*file_names.FILES, file_names.MANIFEST}


def test_other_files_are_not_deleted(compiler: FakeCompiler, tmp_path: Path) -> None:
    build_tiny(tmp_path / "a")
    (tmp_path / "a" / "model.mine.irpa").write_bytes(b"fine-tuned")
    with pytest.raises(BuildError, match=r"contains `model\.mine\.irpa`, which is not part of an artefact"):
        build_tiny(tmp_path / "a", "cpu:znver4")


def test_progress_names_the_cpus(
    compiler: FakeCompiler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build("random:tiny", tmp_path / "a", BuildOptions(device=SEVERAL), PlainProgress(), own_types=True)
    lines = capsys.readouterr().err.splitlines()
    assert "weights: 0 MB of bf16 for znver4" in lines
    assert "weights: 0 MB of bf16 for x86-64-v4, x86-64-v3" in lines
    assert lines.count("compile") == 3
    stored = sum(path.stat().st_size for path in (tmp_path / "a").glob("*.irpa"))
    assert float(lines[0].split()[2]) == pytest.approx(stored / 1e6, abs=0.11)


def test_the_cache_lists_and_prunes_them(compiler: FakeCompiler, tmp_path: Path) -> None:
    build_tiny(tmp_path / "cache" / "served" / "tiny")
    held = contents(tmp_path / "cache")
    assert sorted(one.kind for one in held) == ["model", *["program"] * 3, "self-test", *["weights"] * 2]
    assert {one.device for one in held} == {"cpu:znver4,x86-64-v4,x86-64-v3"}
    (model,) = (one for one in held if one.kind == "model")
    assert model.size == sum(path.stat().st_size for path in model.path.iterdir())


@pytest.mark.slow
def test_int8_is_refused_for_the_cpu_that_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHORTFIN_LLM_CACHE", str(tmp_path / "cache"))
    options = replace(BuildOptions(), device="cpu:x86-64-v3,nehalem", weights="int8")
    with pytest.raises(BuildError, match=r"int8 needs .* is not"):
        build("random:tiny", tmp_path / "a", options, QuietProgress())
    assert names(tmp_path) <= {"cache"}
    assert not os.path.lexists(tmp_path / "a")


def test_a_build_tells_which_programs_it_drops(
    compiler: FakeCompiler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(device: str) -> list[str]:
        options = BuildOptions.for_devices(device)
        build("random:tiny", tmp_path / "a", options, PlainProgress(), self_test=False)
        return [line for line in capsys.readouterr().err.splitlines() if "replaces" in line]

    assert told("hip:gfx1100,gfx942,cpu:x86-64-v3") == []
    assert told("cpu:x86-64-v3,x86-64-v4") == [f"{tmp_path}/a: replaces the programs for gfx1100, gfx942"]
    assert told("cpu:x86-64-v3,x86-64-v4,hip:gfx942") == []
