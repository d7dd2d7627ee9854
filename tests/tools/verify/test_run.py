from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from shortfin_apps.llm.artifact import file_names
from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.artifact.file_record import record
from shortfin_apps.llm.cli import main
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.tools.verify.run import document, verify
from tests.partial_copy import LEFT_OUT, add_missing_gpu


@pytest.fixture
def copy(tiny_artifact: Artifact, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_artifact.vmfb.parent, tmp_path / "tiny"))


def flip(path: Path, at: int) -> None:
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[at] ^= 0x40
    path.write_bytes(content)


def records_again(folder: Path, name: str) -> None:
    """Makes the manifest agree with a file that was changed."""
    path = folder / file_names.MANIFEST
    manifest = json.loads(path.read_text())
    found = record(folder / name)
    manifest["files"][name] = {"sha256": found.sha256, "size_bytes": found.size_bytes}
    path.write_text(json.dumps(manifest))


def test_a_right_artefact_passes(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(copy)]) == 0
    shown = capsys.readouterr().out
    assert "all 7 files are unchanged since the build" in shown
    assert "decode_bs32" in shown
    found = verify(copy)
    assert found.is_right
    [program] = document(found)["programs"]
    assert program["failures"] == program["differing_bits"] == []
    assert set(program["entries"]) == set(found.manifest.program.entries)


def test_a_damaged_file_is_named_and_its_effect_shown(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(copy / file_names.PARAMETERS, -1025)  # the head, which is the last of the parameters
    assert main(["verify", str(copy), "--json", "-"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["is_right"]
    assert list(found["wrong_files"]) == [file_names.PARAMETERS]


def test_parameters_of_another_model_are_seen_by_what_they_compute(copy: Path) -> None:
    path = copy / file_names.PARAMETERS
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    half = len(content) // 2
    content[half : half + 20_000] = content[half + 20_000 : half + 40_000]
    path.write_bytes(content)
    records_again(copy, file_names.PARAMETERS)
    found = verify(copy)
    assert not found.wrong_files
    assert not found.is_right
    assert found.results[0].location is not None


def test_what_a_copy_left_out_is_named_and_the_rest_is_run(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_missing_gpu(copy)
    assert main(["verify", str(copy), "--json", "-"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["wrong_files"] == dict.fromkeys(LEFT_OUT, "is missing")
    [program] = found["programs"]
    assert (program["program"], program["is_right"]) == ("host", True)
    (copy / file_names.VMFB).unlink()  # that of this machine, too
    assert main(["verify", str(copy)]) == 2
    assert "no such file" in capsys.readouterr().err


def test_an_artefact_without_a_self_test_has_only_its_files_compared(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy / file_names.SELF_TEST).unlink()
    path = copy / file_names.MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["files"][file_names.SELF_TEST]
    path.write_text(json.dumps(manifest))
    assert main(["verify", str(copy)]) == 2
    assert "has no self-test; `shortfin-llm build` adds one" in capsys.readouterr().err


def test_a_damaged_self_test_is_not_run(copy: Path) -> None:
    flip(copy / file_names.SELF_TEST, 40)
    found = verify(copy)
    assert list(found.wrong_files) == [file_names.SELF_TEST]
    assert not found.is_right
    assert not found.is_tested


def test_a_folder_that_is_no_artefact_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError):
        verify(tmp_path)
