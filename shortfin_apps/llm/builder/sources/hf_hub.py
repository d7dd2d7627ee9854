"""Download models from the Hugging Face hub, named `ORG/NAME`, `ORG/NAME@REVISION` or `ORG/NAME:Q4_K_M`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import TypeVar

from shortfin_apps.llm.builder.progress import BuildProgress
from shortfin_apps.llm.builder.sources.first_look import look_at_directory, look_at_gguf_start
from shortfin_apps.llm.builder.sources.hf_files import (
    OTHER_TOKENIZERS,
    TOKENIZER,
    TOKENIZER_FILES,
    WEIGHTS_INDEX,
    weight_files,
)
from shortfin_apps.llm.contract.errors import BuildError

_NAME = re.compile(
    r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<quantisation>[\w.-]+))?", re.ASCII
)
Answer = TypeVar("Answer")
_FORMS = "hf:ORG/NAME, hf:ORG/NAME@REVISION or hf:ORG/NAME:Q4_K_M, a GGUF file of the repository"
_START = 1 << 18  # first bytes of a GGUF file, which contain the architecture and the kind of tokenizer


class Hub:
    """The used functions of the `huggingface_hub` library, which is only imported on use, as that is slow."""

    def fetch(self, repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        """Download the files that match the patterns; return their directory."""
        from huggingface_hub import snapshot_download

        return str(snapshot_download(repo_id, revision=revision, allow_patterns=allow_patterns))

    def files(self, repo_id: str, revision: str | None) -> list[str] | None:
        """List a repository's files; None if HF_HUB_OFFLINE is set."""
        from huggingface_hub import constants, list_repo_files

        if constants.HF_HUB_OFFLINE:
            return None
        return list(list_repo_files(repo_id, revision=revision))

    def read_start(self, repo_id: str, revision: str | None, name: str) -> bytes:
        """Read the first 256 KiB of a file."""
        from huggingface_hub import HfFileSystem

        path = f"{repo_id}/{name}"
        with HfFileSystem().open(path, "rb", revision=revision, block_size=_START) as file:
            return bytes(file.read(_START))


def fetch_model(name: str, progress: BuildProgress, hub: Hub | None = None) -> Path:
    """Download a model to the hub's cache; return its directory. Raises BuildError.

    If `name` names a quantisation, only this GGUF file is downloaded, and its path is returned (of split
    files, the path of the first). Unsupported models are rejected before the weights are downloaded, by
    their configuration and tokenizer, or by the start of the GGUF file. The hub's environment variables
    apply: HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE.
    """
    repository, quantisation = _repository(name, hub)
    with progress.stage("fetch") as stage:
        stage.say(f"{name} from the Hugging Face hub")
        if quantisation is not None:
            return repository.fetch_gguf(quantisation)
        return repository.fetch_directory()


def fetch_config(name: str, hub: Hub | None = None) -> Path:
    """Download a repository's `config.json`; return its path, where no file is if the repository has none.

    Raises BuildError.
    """
    return _repository(name, hub)[0].fetch_config() / "config.json"


def fetch_head(name: str, progress: BuildProgress, hub: Hub | None = None) -> Path:
    """Download an EAGLE-3 head, which needs no tokenizer; return its directory. Raises BuildError."""
    repository, _ = _repository(name, hub)
    with progress.stage("fetch") as stage:
        stage.say(f"{name} from the Hugging Face hub")
        return repository.fetch_weights(repository.fetch_config())


def _repository(name: str, hub: Hub | None) -> tuple[_Repository, str | None]:
    """Return the repository, and the quantisation of the GGUF file, if `name` has one."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise BuildError(f"hf:{name}: expected {_FORMS}")
    return _Repository(name, match["id"], match["revision"], hub or Hub()), match["quantisation"]


class _Repository:
    def __init__(self, name: str, repo_id: str, revision: str | None, hub: Hub) -> None:
        self._name = name
        self._repo_id = repo_id
        self._revision = revision
        self._hub = hub

    def fetch_directory(self) -> Path:
        directory = self._get(["config.json", WEIGHTS_INDEX, *TOKENIZER_FILES])
        if not (directory / "config.json").exists():
            raise BuildError(
                f"hf:{self._name}: has no config.json; if it has GGUF files, name one, as in "
                f"hf:{self._name}:Q4_K_M"
            )
        if not (directory / TOKENIZER).exists():
            directory = self._get(list(OTHER_TOKENIZERS))
        look_at_directory(directory)
        return self.fetch_weights(directory)

    def fetch_config(self) -> Path:
        """Download `config.json` and the index of the weights; return the directory."""
        return self._get(["config.json", WEIGHTS_INDEX])

    def fetch_weights(self, directory: Path) -> Path:
        """Download the weights whose index, if any, is in `directory`; return the directory."""
        return self._get(weight_files(directory))

    def fetch_gguf(self, quantisation: str) -> Path:
        """Download the GGUF file with a name that ends in `quantisation` (case-insensitive); return its path.

        Of split files, all are downloaded, and the path of the first is returned.
        """
        self._look_at_gguf(quantisation)
        endings = {quantisation, quantisation.upper(), quantisation.lower()}
        patterns = [f"*{ending}{part}.gguf" for ending in endings for part in ("", "-?????-of-?????")]
        directory = self._get(sorted(patterns))
        found = (path.relative_to(directory).as_posix() for path in directory.rglob("*.gguf"))
        return directory / self._choose(found, quantisation)

    def _look_at_gguf(self, quantisation: str) -> None:
        """Raise BuildError for an unsupported file, reading only its start; does nothing when offline."""
        files = self._ask(lambda: self._hub.files(self._repo_id, self._revision))
        if files is None:
            return
        name = self._choose(files, quantisation)
        start = self._ask(lambda: self._hub.read_start(self._repo_id, self._revision, name))
        look_at_gguf_start(f"hf:{self._name}", start)

    def _choose(self, files: Iterable[str], quantisation: str) -> str:
        whole = re.compile(rf"(.*[.-])?{re.escape(quantisation)}(-00001-of-\d{{5}})?\.gguf", re.IGNORECASE)
        names = {file: PurePosixPath(file).name for file in sorted(files)}
        found = {
            file: name
            for file, name in names.items()
            if whole.fullmatch(name) and not name.startswith("mmproj")
        }
        if len(found) == 1:
            return next(iter(found))
        if found:
            listed = ", ".join(found.values())
            raise BuildError(f"hf:{self._name}: several files end in {quantisation}.gguf: {listed}")
        raise BuildError(f"hf:{self._name}: no file ends in {quantisation}.gguf")

    def _get(self, patterns: list[str]) -> Path:
        directory = self._ask(
            lambda: self._hub.fetch(self._repo_id, revision=self._revision, allow_patterns=patterns)
        )
        return Path(directory)

    def _ask(self, question: Callable[[], Answer]) -> Answer:
        try:
            return question()
        except Exception as error:  # hub, HTTP and file errors have no common base
            summary = str(error).strip().partition("\n")[0]
            raise BuildError(f"hf:{self._name}: cannot be downloaded ({summary})") from error
