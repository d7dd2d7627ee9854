from __future__ import annotations

import contextlib
import logging
import shutil
from pathlib import Path

import pytest

from shortfin_apps.llm.artifact import file_names, verification
from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.artifact.file_record import BLOCK_BYTES
from shortfin_apps.llm.artifact.verification import Verify, verifying
from shortfin_apps.llm.contract.errors import ArtifactError


@pytest.fixture
def folder(tiny_artifact: Artifact, tmp_path: Path) -> Path:
    """A copy of an artefact that a test may change."""
    return Path(shutil.copytree(tiny_artifact.vmfb.parent, tmp_path / "artefact"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def load(folder: Path, verify: Verify = "hash", happened: list[str] | None = None) -> list[str]:
    """The events in order: the model is loaded, then verified."""
    happened = [] if happened is None else happened
    with verifying(Artifact.open(folder, for_this_host=False), verify) as confirm:
        happened.append("loaded")
        confirm()
        happened.append("confirmed")
    return happened


def test_an_intact_artefact_passes(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert load(folder) == ["loaded", "confirmed"]
    assert [record.message[:16] for record in caplog.records] == ["hashed 100 % of "]


@pytest.mark.parametrize("name", [file_names.VMFB, file_names.TOKENIZER])
def test_a_damaged_program_or_tokenizer_is_refused_before_it_is_loaded(folder: Path, name: str) -> None:
    flip(folder / name)
    with (
        pytest.raises(ArtifactError, match=rf"{name}: has another content.*--verify none"),
        verifying(Artifact.open(folder, for_this_host=False), "hash"),
    ):
        raise AssertionError("it is loaded")


def test_damaged_parameters_are_refused_before_the_server_is_ready(folder: Path) -> None:
    flip(folder / file_names.PARAMETERS)
    happened: list[str] = []
    with pytest.raises(ArtifactError, match=rf"{file_names.PARAMETERS}: has another content"):
        load(folder, happened=happened)
    assert happened == ["loaded"]


@pytest.mark.parametrize("name", verification.EDITABLE)
def test_an_edited_config_is_logged(folder: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    path = folder / name
    path.write_text(path.read_text() + "\n")
    assert load(folder) == ["loaded", "confirmed"]
    assert f"{name} has" in caplog.text


@pytest.mark.parametrize("verify", ["none", "size"])
def test_nothing_is_read_without_verify_hash(folder: Path, verify: Verify) -> None:
    flip(folder / file_names.PARAMETERS)
    assert load(folder, verify) == ["loaded", "confirmed"]


def test_hashing_stops_when_loading_fails(folder: Path) -> None:
    flip(folder / file_names.PARAMETERS)
    with pytest.raises(KeyError), verifying(Artifact.open(folder, for_this_host=False), "hash"):
        raise KeyError


def test_a_large_file_is_reported_in_steps(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "MIN_REPORT_BYTES", 1)
    progress = verification._Progress(40 * BLOCK_BYTES)
    with caplog.at_level(logging.INFO):
        for _ in range(40):
            progress.advance(BLOCK_BYTES)
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [
        *range(10, 101, 10)
    ]


def test_loose_files_are_verified_where_the_manifest_covers_them(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / file_names.TOKENIZER).rename(tmp_path / "other.json")
    flip(folder / file_names.PARAMETERS)
    artifact = Artifact.from_files(
        vmfb=folder / file_names.VMFB,
        parameters=(folder / file_names.PARAMETERS,),
        model_config=folder / file_names.CONFIG,
        tokenizer_json=tmp_path / "other.json",
    )
    with caplog.at_level(logging.INFO), contextlib.ExitStack() as stack:
        confirm = stack.enter_context(verifying(artifact, "hash"))
        with pytest.raises(ArtifactError, match=rf"{file_names.PARAMETERS}: has another content"):
            confirm()
    assert "other.json: not verified" in caplog.text
