"""Identifies the model that answered, with hashes of the program in use and of its tokenizer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.artifact.file_names import CONFIG, GENERATION_CONFIG
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.serving.receipts.encoding import canonical_json, digest, to_text


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Hashes of a model's files, each base64url of 16 bytes.

    `artifact` covers the VMFB, its parameters and config.json; `tokenizer` covers tokenizer.json and the two
    files next to it that define what ends a sequence. File names are not included: a program has the same
    hash in an artefact for several kinds of CPU.
    """

    artifact: str
    tokenizer: str


def identity_of(artifact: Artifact) -> ModelIdentity | None:
    """Returns the model's identity, or None without a manifest for all of the files. Raises ArtifactError.

    The hashes of the VMFB and of its parameters come from the manifest, and a server checks them while it
    loads (`--verify hash`). The other files may be edited, so their present content is hashed.
    """
    manifest, tokenizer_config = artifact.manifest, artifact.tokenizer_config
    if manifest is None or artifact.is_loose or tokenizer_config is None:
        return None
    program = [manifest.files[path.name].sha256 for path in (artifact.vmfb, *artifact.parameters)]
    texts = (artifact.tokenizer, tokenizer_config, artifact.tokenizer.with_name(GENERATION_CONFIG))
    return ModelIdentity(
        _joined([*program, _sha256(artifact.vmfb.with_name(CONFIG))]),
        _joined([_sha256(path) for path in texts]),
    )


def _joined(hashes: list[str]) -> str:
    return to_text(digest(canonical_json(hashes)))


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror})") from error
