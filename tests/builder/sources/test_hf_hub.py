from __future__ import annotations

import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest

from shortfin_apps.llm.builder.progress import QuietProgress
from shortfin_apps.llm.builder.sources import hf_hub
from shortfin_apps.llm.builder.sources.gguf_file import GgufSource
from shortfin_apps.llm.builder.sources.hf_directory import HfDirectorySource
from shortfin_apps.llm.builder.sources.hf_hub import fetch_config, fetch_head, fetch_model
from shortfin_apps.llm.contract.errors import BuildError
from tests.builder.model_files import write_hf
from tests.builder.sources.test_first_look import write_header
from tests.builder.sources.test_gguf_header import write_parts
from tests.builder.sources.test_tekken_file import write_tekken


class Hub(hf_hub.Hub):
    """Stands for the hub: copies what is asked for of a repository's files into a snapshot."""

    def __init__(self, files: Path, snapshot: Path) -> None:
        self._files = files
        self._snapshot = snapshot
        self.revisions: set[str | None] = set()
        self.is_offline = False

    @property
    def fetched(self) -> set[str]:
        paths = (path for path in self._snapshot.rglob("*") if path.is_file())
        return {path.relative_to(self._snapshot).as_posix() for path in paths}

    def files(self, repo_id: str, revision: str | None) -> list[str] | None:
        if self.is_offline:
            return None
        return [path.relative_to(self._files).as_posix() for path in self._files.rglob("*") if path.is_file()]

    def read_start(self, repo_id: str, revision: str | None, name: str) -> bytes:
        return (self._files / name).read_bytes()[:4096]

    def fetch(self, repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert repo_id == "org/tiny"
        self.revisions.add(revision)
        for path in self._files.rglob("*"):
            name = path.relative_to(self._files).as_posix()
            if path.is_file() and any(fnmatch(name, pattern) for pattern in allow_patterns):
                target = self._snapshot / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
        self._snapshot.mkdir(exist_ok=True)
        return str(self._snapshot)


@pytest.fixture
def hub(tmp_path: Path) -> Hub:
    """A repository with more files than a model needs."""
    files = write_hf(tmp_path / "files")
    for name in (
        "consolidated.safetensors",
        "original/model.safetensors",
        "adapter_model.safetensors",
        "x.bin",
    ):
        (files / name).parent.mkdir(exist_ok=True)
        (files / name).touch()
    return Hub(files, tmp_path / "snapshot")


@pytest.mark.parametrize(
    ("name", "revision"), [("org/tiny", None), ("org/tiny@main", "main"), ("org/tiny@refs/pr/1", "refs/pr/1")]
)
def test_fetches_only_the_needed_files(hub: Hub, name: str, revision: str | None) -> None:
    directory = fetch_model(name, QuietProgress(), hub)
    assert HfDirectorySource(directory, name="org/tiny").spec.name == "org/tiny"
    assert hub.revisions == {revision}
    assert {"config.json", "tokenizer.json"} < hub.fetched
    weights = {name for name in hub.fetched if name.endswith(".safetensors")}
    assert all(name.startswith("model") for name in weights)
    assert "x.bin" not in hub.fetched


@pytest.mark.parametrize("has_json", [True, False])
def test_fetches_another_tokenizer_only_without_a_tokenizer_json(
    hub: Hub, tmp_path: Path, has_json: bool
) -> None:
    write_tekken(tmp_path / "files")
    if not has_json:
        (tmp_path / "files" / "tokenizer.json").unlink()
    source = HfDirectorySource(fetch_model("org/tiny", QuietProgress(), hub))
    assert ("tekken.json" in hub.fetched) is not has_json
    assert source.tokenizer_files().tokenizer


def test_of_a_head_no_tokenizer_is_fetched(hub: Hub) -> None:
    assert fetch_config("org/tiny@v2", hub).is_file()
    assert hub.fetched == {"config.json"}
    fetch_head("org/tiny@v2", QuietProgress(), hub)
    assert hub.fetched == {"config.json", "model.safetensors"}
    assert hub.revisions == {"v2"}


def test_an_unsupported_model_is_refused_before_its_weights_are_fetched(hub: Hub) -> None:
    (hub._files / "config.json").write_text('{"model_type": "rwkv"}')
    with pytest.raises(BuildError, match="architecture `rwkv` is not supported"):
        fetch_model("org/tiny", QuietProgress(), hub)
    assert not any(name.endswith(".safetensors") for name in hub.fetched)


GGUF_FILES = ("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "BF16/tiny-bf16.gguf", "mmproj-Q8_0.gguf", "a-F16.gguf")


@pytest.mark.parametrize(
    ("quantisation", "file"),
    [("Q4_K_M", "tiny-Q4_K_M.gguf"), ("q8_0", "tiny-Q8_0.gguf"), ("BF16", "BF16/tiny-bf16.gguf")],
)
@pytest.mark.parametrize("is_offline", [False, True])
def test_a_quantisation_names_one_gguf_file(
    tmp_path: Path, quantisation: str, file: str, is_offline: bool
) -> None:
    for name in GGUF_FILES:
        (tmp_path / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        write_header(tmp_path / "files" / name, "llama", model="llama")
    hub = Hub(tmp_path / "files", tmp_path / "snapshot")
    hub.is_offline = is_offline
    path = fetch_model(f"org/tiny@v2:{quantisation}", QuietProgress(), hub)
    assert path.relative_to(tmp_path / "snapshot").as_posix() == file
    assert hub.revisions == {"v2"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("tiny-Q8_0.gguf",), r"no file ends in Q4_K_M\.gguf"),
        (("tiny-Q4_K_M-00002-of-00002.gguf",), r"no file ends in Q4_K_M\.gguf"),
        (("a-Q4_K_M.gguf", "b-Q4_K_M.gguf"), r"several files end in Q4_K_M\.gguf: a-Q4_K_M.gguf, b-Q4_K_M"),
    ],
)
def test_refuses_a_quantisation_that_is_not_one_file(
    tmp_path: Path, files: tuple[str, ...], message: str
) -> None:
    (tmp_path / "files").mkdir()
    for name in files:
        (tmp_path / "files" / name).touch()
    with pytest.raises(BuildError, match=message):
        fetch_model("org/tiny:Q4_K_M", QuietProgress(), Hub(tmp_path / "files", tmp_path / "snapshot"))


def test_all_parts_of_a_split_file_are_fetched(tmp_path: Path) -> None:
    (tmp_path / "files/Q8_0").mkdir(parents=True)
    write_parts(tmp_path / "files/Q8_0", 3, stem="tiny-Q8_0")
    hub = Hub(tmp_path / "files", tmp_path / "snapshot")
    path = fetch_model("org/tiny:Q8_0", QuietProgress(), hub)
    assert path.name == "tiny-Q8_0-00001-of-00003.gguf"
    assert len(hub.fetched) == 3
    assert GgufSource(path).spec.name == "tiny"


def test_an_unsupported_gguf_file_is_refused_before_it_is_fetched(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    write_header(tmp_path / "files/tiny-Q8_0.gguf", "rwkv", model="gpt2")
    hub = Hub(tmp_path / "files", tmp_path / "snapshot")
    with pytest.raises(BuildError, match="hf:org/tiny:Q8_0: architecture `rwkv` is not supported"):
        fetch_model("org/tiny:Q8_0", QuietProgress(), hub)
    assert not hub.fetched


def test_a_repository_of_gguf_files_asks_for_one(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    with pytest.raises(BuildError, match="hf:org/tiny:Q4_K_M"):
        fetch_model("org/tiny", QuietProgress(), Hub(tmp_path / "files", tmp_path / "snapshot"))


@pytest.mark.parametrize("name", ["", "tiny", "a/b:", "a/b/c", "a/b@", "a b/c", "org/../x"])
def test_refuses_invalid_names(name: str, hub: Hub) -> None:
    with pytest.raises(BuildError, match="expected hf:ORG/NAME"):
        fetch_model(name, QuietProgress(), hub)
    assert not hub.fetched


def test_a_failed_download_is_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(repo_id: str, **options: object) -> str:
        raise RuntimeError("401 Client Error.\nRequest ID: 1")

    monkeypatch.setattr(hub, "fetch", fetch)
    with pytest.raises(BuildError, match=r"^hf:a/b: cannot be downloaded \(401 Client Error\.\)$"):
        fetch_model("a/b", QuietProgress(), hub)
