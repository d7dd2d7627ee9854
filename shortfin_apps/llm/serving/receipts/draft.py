"""Creates receipts: identifies the model that answers, and collects the tokens until the answer ends."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.artifact.file_names import GENERATION_CONFIG
from shortfin_apps.llm.components.request.messages import ChosenLogit, FinishReason
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.serving.receipts.receipt import Receipt, canonical_json, chain_of, digest, to_text

if TYPE_CHECKING:  # an extra
    from shortfin_apps.llm.serving.receipts.signature import Signer


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Hashes of a model's files, each base64url of 16 bytes.

    `artifact` covers the VMFB, its parameters and config. `tokenizer` covers tokenizer.json, and the
    tokenizer config and generation_config.json, which define the end-of-sequence tokens. File names are not
    hashed: a program has the same hash in an artefact for several devices.
    """

    artifact: str
    tokenizer: str


def identity_of(artifact: Artifact) -> ModelIdentity | None:
    """Return the model's identity, or None if no manifest covers all files. Raises ArtifactError.

    The hashes of the VMFB and its parameters come from the manifest; a server checks the files against the
    manifest while the model loads (`--verify hash`). The content of the other files, which users may edit, is
    hashed here.
    """
    manifest, tokenizer_config = artifact.manifest, artifact.tokenizer_config
    if manifest is None or artifact.is_loose or tokenizer_config is None:
        return None
    program = [manifest.files[path.name].sha256 for path in (artifact.vmfb, *artifact.parameters)]
    texts = (artifact.tokenizer, tokenizer_config, artifact.tokenizer.with_name(GENERATION_CONFIG))
    return ModelIdentity(
        _joined([*program, _sha256(artifact.config_file)]),
        _joined([_sha256(path) for path in texts]),
    )


def _joined(hashes: list[str]) -> str:
    return to_text(digest(canonical_json(hashes)))


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read ({error.strerror})") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptOrder:
    """The parts of a receipt known before the answer; `prompt` is the prompt's text if it is included."""

    identity: ModelIdentity
    sampling: Mapping[str, JsonValue]
    prompt: str | None = None
    signer: Signer | None = None


class ReceiptDraft:
    """The receipt of an answer to `prompt_ids` that is still being generated."""

    def __init__(self, order: ReceiptOrder, prompt_ids: tuple[int, ...]) -> None:
        self._order = order
        self._prompt_ids = prompt_ids
        identity = order.identity
        self._chain = chain_of(identity.artifact, identity.tokenizer, prompt_ids, order.sampling)
        self._output_ids: list[int] = []
        self._entries: set[str] = set()

    def add(self, token_ids: Sequence[int], logits: Sequence[ChosenLogit]) -> None:
        """Add the answer's next tokens, with a logit for each."""
        for token_id, (logit, entry_family) in zip(token_ids, logits, strict=True):
            self._chain.add(token_id, logit)
            self._entries.add(entry_family)
        self._output_ids += token_ids

    def finish(self, finish: FinishReason) -> dict[str, Any]:
        """Return the receipt as JSON objects, signed if there is a key."""
        order = self._order
        receipt = Receipt(
            artifact=order.identity.artifact,
            tokenizer=order.identity.tokenizer,
            prompt_ids=self._prompt_ids,
            output_ids=tuple(self._output_ids),
            sampling=dict(order.sampling),
            finish=finish,
            entries=tuple(sorted(self._entries)),
            logits=to_text(self._chain.end),
            marks=to_text(self._chain.marks),
            prompt=order.prompt,
        )
        return (receipt if order.signer is None else order.signer.signed(receipt)).to_json()
