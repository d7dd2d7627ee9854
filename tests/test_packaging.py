"""The wheel and the editable install work beside shortfin's own `shortfin_apps`, under pip and uv.

shortfin's wheel contains a `shortfin_apps/llm`, too. Ours must be imported, upstream's `sd` and `flux` must
still be found, and uninstalling ours must restore shortfin's.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import itertools
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

from shortfin_apps.llm import __version__
from tests.runtimes import needs_shortfin

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
NOT_SOURCES = shutil.ignore_patterns(
    ".git", ".*_cache", ".venv*", ".aarch64", ".artifacts", "__pycache__", "dist", ".hyp*"
)
CASES = list(itertools.product(("pip", "uv"), ("wheel", "editable"), ("before", "after")))

# Run by the interpreter under test: the directory each package would be imported from.
LOCATE = """
import importlib.util, json, sys
specs = {name: importlib.util.find_spec(f"shortfin_apps.{name}") for name in ("llm", "sd", "flux")}
json.dump({name: list(spec.submodule_search_locations) for name, spec in specs.items()}, sys.stdout)
"""


@dataclass(frozen=True)
class Environment:
    """A fresh virtual environment and its installer, which does not resolve dependencies."""

    path: Path
    installer: str

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return next(self.path.glob("lib/python3.*/site-packages"))

    def install(self, *what: str | Path) -> None:
        self._installer("install", "--no-deps", "--quiet", *what)

    def uninstall(self, name: str) -> None:
        self._installer("uninstall", "--quiet", *(["--yes"] if self.installer == "pip" else []), name)

    def homes(self) -> dict[str, list[str]]:
        """The locations of the packages `llm`, `sd` and `flux` of `shortfin_apps`, without importing them."""
        found = json.loads(run(self.python, "-I", "-c", LOCATE))
        assert isinstance(found, dict)
        return found

    def _installer(self, verb: str, *arguments: str | Path) -> None:
        if self.installer == "uv":
            run(sys.executable, "-m", "uv", "pip", verb, "--python", self.python, *arguments)
        else:
            run(sys.executable, "-m", "pip", "--python", self.python, verb, *arguments)


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


def hatchling_build(target: str, source: Path, directory: Path) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", directory, cwd=source)
    (built,) = directory.iterdir()
    return built


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree that cannot change between builds."""
    directory = tmp_path_factory.mktemp("checkout") / "source"
    shutil.copytree(ROOT, directory, ignore=NOT_SOURCES)
    return directory


@pytest.fixture(scope="session")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hatchling_build("wheel", checkout, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hatchling_build("sdist", checkout, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="session")
def shortfin_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the shortfin release this environment has; needs the package index."""
    directory = tmp_path_factory.mktemp("shortfin")
    release = f"shortfin=={importlib.metadata.version('shortfin')}"
    run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", directory, release)
    (downloaded,) = directory.iterdir()
    return downloaded


def names_in_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def files_under(checkout: Path, directory: str) -> set[str]:
    """Every file in `directory` of the source tree, relative to the tree's root."""
    files = (path for path in (checkout / directory).rglob("*") if path.is_file())
    return {path.relative_to(checkout).as_posix() for path in files}


def test_wheel_holds_the_whole_package_in_its_private_directory(wheel: Path, checkout: Path) -> None:
    names = {name for name in names_in_wheel(wheel) if ".dist-info/" not in name}
    package = files_under(checkout, "shortfin_apps")
    assert names == {"_shortfin_llm.pth"} | {f"_shortfin_llm/{name}" for name in package}
    assert "_shortfin_llm/shortfin_apps/llm/py.typed" in names
    assert any(name.endswith(".mlir.j2") for name in names)


def test_wheel_metadata(wheel: Path) -> None:
    (metadata,) = importlib.metadata.distributions(path=[str(wheel)])
    assert (metadata.name, metadata.version) == ("shortfin-llm", __version__)
    assert [(e.name, e.value) for e in metadata.entry_points] == [
        ("shortfin-llm", "shortfin_apps.llm.cli:main")
    ]
    assert metadata.metadata["License-Expression"] == "Apache-2.0"
    assert "licenses/LICENSE" in {"/".join(PurePosixPath(f).parts[1:]) for f in metadata.files or ()}


def test_wheel_built_from_the_sdist_is_the_same(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    run("tar", "-xf", sdist, "-C", tmp_path)
    (source,) = tmp_path.iterdir()
    rebuilt = hatchling_build("wheel", source, tmp_path / "rebuilt")
    assert rebuilt.read_bytes() == wheel.read_bytes()


def test_sdist_can_run_its_own_tests(sdist: Path, checkout: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {"/".join(PurePosixPath(name).parts[1:]) for name in archive.getnames()}
    top = {"Makefile", "pyproject.toml", "LICENSE", "README.md", ".ci/run", ".pre-commit-config.yaml"}
    assert top | files_under(checkout, "tests") | files_under(checkout, "docs") <= names


@needs_shortfin
@pytest.mark.parametrize(("installer", "form", "order"), CASES)
def test_ours_wins_beside_shortfin_and_leaves_it_intact(
    installer: str, form: str, order: str, checkout: Path, wheel: Path, shortfin_wheel: Path, tmp_path: Path
) -> None:
    environment = make_environment(tmp_path / "env", installer)
    source = shutil.copytree(checkout, tmp_path / "source") if form == "editable" else None
    ours = ["--editable", str(source)] if source else [str(wheel)]
    installs = [ours, [str(shortfin_wheel)]]
    for what in installs if order == "before" else reversed(installs):
        environment.install(*what)

    upstream = environment.site_packages / "shortfin_apps"
    home = (source or environment.site_packages / "_shortfin_llm") / "shortfin_apps"
    siblings = {"sd": [str(upstream / "sd")], "flux": [str(upstream / "flux")]}
    assert environment.homes() == {"llm": [str(home / "llm")], **siblings}
    assert run(environment.path / "bin" / "shortfin-llm", "--version") == f"shortfin-llm {__version__}\n"
    if source:
        assert_edits_are_seen(environment, source)
    assert changed_files(environment.site_packages, "shortfin") == []

    environment.uninstall("shortfin-llm")
    assert environment.homes() == {"llm": [str(upstream / "llm")], **siblings}
    assert changed_files(environment.site_packages, "shortfin") == []
    # pip leaves the private directory behind, empty.
    left = [path for path in environment.site_packages.rglob("*shortfin_llm*/**") if not path.is_dir()]
    assert left + list(environment.site_packages.glob("*shortfin_llm*.pth")) == []
    assert not (environment.path / "bin" / "shortfin-llm").exists()


def make_environment(path: Path, installer: str) -> Environment:
    run(sys.executable, "-m", "uv", "venv", "--quiet", "--python", sys.executable, path)
    return Environment(path, installer)


def assert_edits_are_seen(environment: Environment, source: Path) -> None:
    with (source / "shortfin_apps/llm/contract/errors.py").open("a") as errors:
        errors.write("\nEDITED = 'just now'\n")
    edited = "from shortfin_apps.llm.contract.errors import EDITED; print(EDITED)"
    assert run(environment.python, "-I", "-c", edited) == "just now\n"


def changed_files(site_packages: Path, distribution: str) -> list[str]:
    """The files of an installed distribution, bytecode aside, that differ from its RECORD or are missing."""
    (record,) = site_packages.glob(f"{distribution}-*.dist-info/RECORD")
    changed = []
    for name, digest, _ in csv.reader(record.read_text().splitlines()):
        file = site_packages / name
        if digest and file.suffix != ".pyc" and not (file.exists() and digest == f"sha256={_sha256(file)}"):
            changed.append(name)
    return changed


def _sha256(file: Path) -> str:
    digest = hashlib.sha256(file.read_bytes()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
