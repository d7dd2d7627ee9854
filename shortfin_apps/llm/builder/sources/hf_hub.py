"""Downloads model repositories from the Hugging Face hub: `ORG/NAME` or `ORG/NAME@REVISION`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Protocol

from shortfin_apps.llm.builder.progress import BuildProgress
from shortfin_apps.llm.builder.sources.hf_directory import FILE_PATTERNS
from shortfin_apps.llm.errors import BuildError

_REPOSITORY = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)


class Fetch(Protocol):
    """The part of `huggingface_hub.snapshot_download`'s signature that is used here."""

    def __call__(self, repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str: ...


def fetch_repository(name: str, progress: BuildProgress, fetch: Fetch | None = None) -> Path:
    """Downloads a repository to the hub's cache and returns its directory. Raises BuildError.

    The hub's environment variables apply: HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE.
    """
    match = _REPOSITORY.fullmatch(name)
    if match is None:
        raise BuildError(f"hf:{name}: expected hf:ORG/NAME or hf:ORG/NAME@REVISION")
    fetch = fetch or _snapshot_download
    with progress.stage("fetch") as stage:
        stage.say(f"{name} from the Hugging Face hub")
        try:
            return Path(fetch(match["id"], revision=match["revision"], allow_patterns=list(FILE_PATTERNS)))
        except Exception as error:  # hub, HTTP and file errors have no common base
            summary = str(error).strip().partition("\n")[0]
            raise BuildError(f"hf:{name}: cannot be downloaded ({summary})") from error


def _snapshot_download(repo_id: str, **options: Any) -> str:
    from huggingface_hub import snapshot_download  # imported here because it is slow

    return str(snapshot_download(repo_id, **options))
