"""Downloads models from the Hugging Face hub: `ORG/NAME`, `ORG/NAME@REVISION`, `ORG/NAME:Q4_K_M`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Protocol

from shortfin_apps.llm.builder.progress import BuildProgress
from shortfin_apps.llm.builder.sources.first_look import look_at_directory
from shortfin_apps.llm.builder.sources.hf_directory import TOKENIZER_FILES, WEIGHTS, WEIGHTS_INDEX
from shortfin_apps.llm.builder.sources.json_file import read_json
from shortfin_apps.llm.errors import BuildError

_NAME = re.compile(
    r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<quantisation>[\w.-]+))?", re.ASCII
)
_FORMS = "hf:ORG/NAME, hf:ORG/NAME@REVISION or hf:ORG/NAME:Q4_K_M, a GGUF file of the repository"


class Fetch(Protocol):
    """The part of `huggingface_hub.snapshot_download`'s signature that is used here."""

    def __call__(self, repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str: ...


def fetch_model(name: str, progress: BuildProgress, fetch: Fetch | None = None) -> Path:
    """Downloads a model to the hub's cache; its directory, or its GGUF file if `name` has a quantisation.

    Of a directory, the configuration and the tokenizer are fetched and looked at first, then the weights that
    belong to them and no others. The hub's environment variables apply: HF_HOME, HF_TOKEN, HF_ENDPOINT,
    HF_HUB_OFFLINE. Raises BuildError.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise BuildError(f"hf:{name}: expected {_FORMS}")
    repository = _Repository(name, match["id"], match["revision"], fetch or _snapshot_download)
    with progress.stage("fetch") as stage:
        stage.say(f"{name} from the Hugging Face hub")
        if match["quantisation"] is not None:
            return repository.fetch_gguf(match["quantisation"])
        return repository.fetch_directory()


class _Repository:
    def __init__(self, name: str, repo_id: str, revision: str | None, fetch: Fetch) -> None:
        self._name = name
        self._repo_id = repo_id
        self._revision = revision
        self._fetch = fetch

    def fetch_directory(self) -> Path:
        directory = self._get(["config.json", WEIGHTS_INDEX, *TOKENIZER_FILES])
        if not (directory / "config.json").exists():
            raise BuildError(
                f"hf:{self._name}: has no config.json; if it has GGUF files, name one, as in "
                f"hf:{self._name}:Q4_K_M"
            )
        look_at_directory(directory)
        return self._get(_weight_files(directory))

    def fetch_gguf(self, quantisation: str) -> Path:
        """The one file whose name ends in the quantisation, in whatever case."""
        endings = {quantisation, quantisation.upper(), quantisation.lower()}
        directory = self._get([f"*{ending}.gguf" for ending in sorted(endings)])
        whole = re.compile(rf"(.*[.-])?{re.escape(quantisation)}\.gguf", re.IGNORECASE)
        files = sorted(
            path
            for path in directory.rglob("*.gguf")
            if whole.fullmatch(path.name) and not path.name.startswith("mmproj")
        )
        if len(files) == 1:
            return files[0]
        if files:
            names = ", ".join(path.name for path in files)
            raise BuildError(f"hf:{self._name}: several files end in {quantisation}.gguf: {names}")
        raise BuildError(
            f"hf:{self._name}: no file ends in {quantisation}.gguf; files that are split "
            "(-00001-of-00002.gguf) are not supported: join them with llama.cpp's llama-gguf-split"
        )

    def _get(self, patterns: list[str]) -> Path:
        try:
            return Path(self._fetch(self._repo_id, revision=self._revision, allow_patterns=patterns))
        except Exception as error:  # hub, HTTP and file errors have no common base
            summary = str(error).strip().partition("\n")[0]
            raise BuildError(f"hf:{self._name}: cannot be downloaded ({summary})") from error


def _weight_files(directory: Path) -> list[str]:
    """The files that the index names, or the only one: not `consolidated.safetensors` nor adapters."""
    index = directory / WEIGHTS_INDEX
    if not index.exists():
        return [WEIGHTS]
    try:
        return sorted(set(read_json(index)["weight_map"].values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise BuildError(f"{index}: not an index of weights ({error})") from error


def _snapshot_download(repo_id: str, **options: Any) -> str:
    from huggingface_hub import snapshot_download  # imported here because it is slow

    return str(snapshot_download(repo_id, **options))
