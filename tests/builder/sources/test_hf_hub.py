from __future__ import annotations

from pathlib import Path

import pytest

from shortfin_apps.llm.builder.progress import QuietProgress
from shortfin_apps.llm.builder.sources.hf_directory import HfDirectorySource
from shortfin_apps.llm.builder.sources.hf_hub import fetch_repository
from shortfin_apps.llm.errors import BuildError
from tests.builder.model_files import write_hf


@pytest.mark.parametrize(
    ("name", "revision"), [("org/tiny", None), ("org/tiny@main", "main"), ("org/tiny@refs/pr/1", "refs/pr/1")]
)
def test_requests_only_the_needed_files(tmp_path: Path, name: str, revision: str | None) -> None:
    asked: list[tuple[str, str | None, list[str]]] = []

    def fetch(repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repo_id, revision, allow_patterns))
        return str(write_hf(tmp_path))

    directory = fetch_repository(name, QuietProgress(), fetch)
    assert HfDirectorySource(directory, name="org/tiny").spec.name == "org/tiny"
    [(repo_id, got_revision, patterns)] = asked
    assert (repo_id, got_revision) == ("org/tiny", revision)
    assert {"config.json", "*.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(patterns)
    assert not any(pattern.endswith(".bin") for pattern in patterns)


@pytest.mark.parametrize("name", ["", "tiny", "a/b/c", "a/b@", "a b/c", "org/../x"])
def test_refuses_invalid_names(name: str) -> None:
    def fetch(repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        raise AssertionError("must not be asked")

    with pytest.raises(BuildError, match="expected hf:ORG/NAME"):
        fetch_repository(name, QuietProgress(), fetch)


def test_a_failed_download_is_one_line() -> None:
    def fetch(repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        raise RuntimeError("401 Client Error.\nRequest ID: 1")

    with pytest.raises(BuildError, match=r"^hf:a/b: cannot be downloaded \(401 Client Error\.\)$"):
        fetch_repository("a/b", QuietProgress(), fetch)
