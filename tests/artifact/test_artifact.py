from __future__ import annotations

import json
import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shortfin_apps.llm.artifact import file_names
from shortfin_apps.llm.artifact.artifact import Artifact, Manifest
from shortfin_apps.llm.builder.sources.random_tiny import SPEC
from shortfin_apps.llm.cli import main
from shortfin_apps.llm.contract.errors import ArtifactError


@pytest.fixture
def folder(tiny_artifact: Artifact, tmp_path: Path) -> Path:
    """A copy of an artefact that a test may change."""
    copy = tmp_path / "artefact"
    shutil.copytree(tiny_artifact.vmfb.parent, copy)
    for path in copy.iterdir():
        path.chmod(0o644)
    return copy


def test_opens(folder: Path) -> None:
    artifact = Artifact.open(folder)
    assert artifact.name == "random-tiny"
    assert artifact.vocab_size == SPEC.vocab_size
    assert artifact.manifest is not None
    assert artifact.manifest.spec == SPEC
    assert artifact.config.decode_batch_sizes == artifact.manifest.options.decode_batch_sizes
    entries = artifact.manifest.program.entries
    assert {f"decode_bs{n}" for n in artifact.config.decode_batch_sizes} <= set(entries)
    assert all(path.is_file() for path in (artifact.vmfb, *artifact.parameters, artifact.tokenizer))


def test_manifest_round_trip(tiny_artifact: Artifact, tmp_path: Path) -> None:
    manifest = tiny_artifact.manifest
    assert manifest is not None
    (tmp_path / "m.json").write_bytes(manifest.to_json())
    assert Manifest.load(tmp_path / "m.json") == manifest


@pytest.mark.parametrize("version", ["3.8.0", "3.99.0rc20270101", "3.1", None])
def test_another_compilers_program_is_refused_with_the_command_that_makes_it_anew(
    folder: Path, version: str | None
) -> None:
    manifest = Artifact.open(folder).manifest
    assert manifest is not None
    versions = {} if version is None else {"iree-base-compiler": version}
    (folder / file_names.MANIFEST).write_bytes(replace(manifest, versions=versions).to_json())
    command = f"shortfin-llm build random:tiny -o {folder}"
    with pytest.raises(ArtifactError, match=re.escape(f"cannot load; rebuild it with `{command}")):
        Artifact.open(folder)
    assert Artifact.open(folder, for_this_host=False).name == "random-tiny"


@pytest.mark.parametrize("name", [*file_names.FILES, file_names.MANIFEST])
def test_every_file_is_required(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ArtifactError, match=name):
        Artifact.open(folder)


@pytest.mark.parametrize("name", [file_names.VMFB, file_names.PARAMETERS])
def test_a_truncated_file_is_refused(folder: Path, name: str) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:-1])
    with pytest.raises(ArtifactError, match=rf"{name}: its size differs.*rebuild"):
        Artifact.open(folder)


def test_pages_may_be_changed_at_deploy_time(folder: Path) -> None:
    path = folder / file_names.CONFIG
    config = json.loads(path.read_text())
    config["paged_kv_cache"]["device_block_count"] = 12345
    path.write_text(json.dumps(config))
    assert Artifact.open(folder).config.paged_kv_cache.device_block_count == 12345


@pytest.mark.parametrize("version", [1, 2, 99, None, "3"])
def test_a_manifest_of_another_version_asks_for_a_build(folder: Path, version: object) -> None:
    path = folder / file_names.MANIFEST
    manifest = json.loads(path.read_text())
    # As version 1 described a model.
    manifest |= {"format_version": version, "spec": {"name": "tiny", "block_count": 2, "qk_norm": False}}
    path.write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match=r"manifest\.json: built by another version.*build it again"):
        Artifact.open(folder)
    with pytest.raises(ArtifactError, match=r"manifest\.json: built by another version"):
        loose(folder)


@pytest.mark.parametrize("command", ["serve", "inspect", "verify"])
def test_commands_say_in_one_line_to_build_an_artefact_with_half_a_manifest_again(
    folder: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / file_names.MANIFEST
    path.write_bytes(path.read_bytes()[:1000])
    assert main([command, str(folder)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"{path}: is damaged (Invalid JSON" in line
    assert line.endswith("); build it again with `shortfin-llm build`")


@pytest.mark.parametrize("command", ["serve", "inspect", "verify"])
def test_commands_say_in_one_line_to_build_an_old_artefact_again(
    folder: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    old = {"format_version": 1, "identity": "x", "spec": {"name": "tiny"}, "files": {}}
    (folder / file_names.MANIFEST).write_text(json.dumps(old))
    assert main([command, str(folder)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("(format 1, and this version reads 4); build it again with `shortfin-llm build`")


@pytest.mark.parametrize("check_sizes", [False, True])
@pytest.mark.parametrize("name", [*file_names.TEXTS, file_names.VMFB, file_names.PARAMETERS])
def test_a_manifest_without_a_file_is_refused_also_if_no_size_is_checked(
    folder: Path, name: str, check_sizes: bool
) -> None:
    path = folder / file_names.MANIFEST
    manifest = json.loads(path.read_text())
    manifest["files"][f"old.{name}"] = manifest["files"].pop(name)
    path.write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError, match=rf"manifest\.json: `files` has no {name}; rebuild"):
        Artifact.open(folder, check_sizes=check_sizes)


def test_a_program_for_missing_cpu_features_is_refused(folder: Path) -> None:
    manifest = Manifest.load(folder / file_names.MANIFEST)
    target = replace(manifest.program.target, cpu="znver9", features=("avx2", "avx512quantum"))
    programs = (replace(manifest.program, target=target),)
    (folder / file_names.MANIFEST).write_bytes(replace(manifest, programs=programs).to_json())
    with pytest.raises(
        ArtifactError, match=r"\(znver9\) with .*avx512quantum, which this CPU lacks; rebuild"
    ):
        Artifact.open(folder)


def test_a_program_for_another_architecture_is_refused(folder: Path) -> None:
    """Also one without features that could be missing here."""
    manifest = Manifest.load(folder / file_names.MANIFEST)
    other = "arm_64" if manifest.program.target.architecture == "x86_64" else "x86_64"
    target = replace(manifest.program.target, architecture=other, cpu="generic", features=())
    programs = (replace(manifest.program, target=target),)
    (folder / file_names.MANIFEST).write_bytes(replace(manifest, programs=programs).to_json())
    with pytest.raises(ArtifactError, match=f"generic, a CPU of another architecture .{other}.; rebuild"):
        Artifact.open(folder)


def test_a_folder_without_a_manifest_is_not_an_artefact(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no such directory"):
        Artifact.open(tmp_path / "none")
    with pytest.raises(ArtifactError, match="not an artefact"):
        Artifact.open(tmp_path)


def test_a_path_that_is_not_utf_8_is_one_sentence(folder: Path) -> None:
    """The runtimes' bindings raise a TypeError for it."""
    renamed = folder.rename(folder.with_name("a\udcff"))
    with pytest.raises(ArtifactError, match="is not UTF-8"):
        Artifact.open(renamed)
    with pytest.raises(ArtifactError, match="is not UTF-8"):
        loose(renamed)


def test_loose_files(folder: Path) -> None:
    (folder / file_names.MANIFEST).unlink()
    artifact = Artifact.from_files(
        vmfb=folder / file_names.VMFB,
        parameters=(folder / file_names.PARAMETERS,),
        model_config=folder / file_names.CONFIG,
        tokenizer_json=folder / file_names.TOKENIZER,
    )
    assert artifact.manifest is None
    assert artifact.vocab_size is None
    assert artifact.name == "model"
    assert artifact.tokenizer_config == folder / file_names.TOKENIZER_CONFIG
    (folder / file_names.TOKENIZER_CONFIG).unlink()
    (folder / file_names.VMFB).unlink()
    with pytest.raises(ArtifactError, match=r"model\.vmfb: no such file"):
        Artifact.from_files(
            vmfb=folder / file_names.VMFB,
            parameters=(folder / file_names.PARAMETERS,),
            model_config=folder / file_names.CONFIG,
            tokenizer_json=folder / file_names.TOKENIZER,
        )


def loose(folder: Path, vmfb: Path | None = None) -> Artifact:
    return Artifact.from_files(
        vmfb=vmfb or folder / file_names.VMFB,
        parameters=(folder / file_names.PARAMETERS,),
        model_config=folder / file_names.CONFIG,
        tokenizer_json=folder / file_names.TOKENIZER,
    )


@pytest.mark.parametrize("through_link", [False, True])
def test_loose_files_obey_the_manifest_beside_the_vmfb(
    folder: Path, tmp_path: Path, through_link: bool
) -> None:
    (tmp_path / "link.vmfb").symlink_to(folder / file_names.VMFB)
    vmfb = tmp_path / "link.vmfb" if through_link else folder / file_names.VMFB
    artifact = loose(folder, vmfb)
    assert artifact.manifest == Manifest.load(folder / file_names.MANIFEST)
    assert (artifact.vocab_size, artifact.name) == (SPEC.vocab_size, vmfb.stem)
    assert artifact.manifest is not None
    target = replace(artifact.manifest.program.target, cpu="znver9", features=("avx512quantum",))
    programs = (replace(artifact.manifest.program, target=target),)
    (folder / file_names.MANIFEST).write_bytes(replace(artifact.manifest, programs=programs).to_json())
    with pytest.raises(ArtifactError, match=r"\(znver9\) with avx512quantum, which this CPU lacks"):
        loose(folder, vmfb)


def test_a_truncated_loose_file_is_refused_if_the_manifest_covers_it(folder: Path, tmp_path: Path) -> None:
    (folder / file_names.PARAMETERS).rename(tmp_path / file_names.PARAMETERS)
    (folder / file_names.PARAMETERS).symlink_to(tmp_path / file_names.PARAMETERS)
    (tmp_path / file_names.PARAMETERS).write_bytes(b"fine-tuned")
    loose(folder)
    (folder / file_names.VMFB).write_bytes(b"short")
    with pytest.raises(ArtifactError, match=r"model\.vmfb: its size differs"):
        loose(folder)


@pytest.mark.parametrize("content", ["{}", "[]", "\xff", '{"name": "a web page", "icons": []}'])
def test_another_tools_manifest_is_ignored(
    folder: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / file_names.MANIFEST).write_text(content, encoding="latin-1")
    with caplog.at_level(logging.INFO):
        assert loose(folder).manifest is None
    assert "its CPU and content are not checked" in caplog.text


def test_a_manifest_of_another_vmfb_is_ignored(folder: Path) -> None:
    (folder / file_names.VMFB).rename(folder / "other.vmfb")
    assert loose(folder, folder / "other.vmfb").manifest is None


def test_a_damaged_manifest_beside_loose_files_is_refused(folder: Path) -> None:
    (folder / file_names.MANIFEST).write_text('{"format_version": 3}')
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        loose(folder)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from([file_names.MANIFEST, file_names.CONFIG]),
    position=st.floats(0, 1, exclude_max=True),
    insert=st.binary(max_size=4),
    removed=st.integers(0, 8),
)
def test_damaged_json_is_read_or_a_typed_error(
    tiny_artifact: Artifact, folder: Path, name: str, position: float, insert: bytes, removed: int
) -> None:
    content = (tiny_artifact.vmfb.parent / name).read_bytes()
    at = int(position * len(content))
    (folder / name).write_bytes(content[:at] + insert + content[at + removed :])
    assert "\n" not in (_refusal(folder) or "")


def _refusal(folder: Path) -> str | None:
    try:
        Artifact.open(folder)
    except ArtifactError as error:
        return str(error)
    return None
