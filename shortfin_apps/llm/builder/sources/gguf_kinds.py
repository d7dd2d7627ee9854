"""Recognise GGUF files that are no text generation model, so that they are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shortfin_apps.llm.contract.errors import BuildError

_MODEL = "give the GGUF file of the model itself"
_ENCODER = f"is the image or audio encoder of a model; {_MODEL}, which is built for text only"
_IMATRIX = f"is an importance matrix, which quantisers read; {_MODEL}"
_OLLAMAS = "holds a model and its image encoder, as Ollama's files; give a conversion by llama.cpp"
_VECTOR = f"is a control vector, which is not supported; {_MODEL} to build it without"
_LORA = (
    "is a LoRA adapter, which is not supported; merge it into its base model with llama.cpp's "
    "`llama-export-lora`, and build the result"
)
# `general.type` -> what the file is, and what to do.
_TYPES = {
    "adapter": _LORA,
    "imatrix": _IMATRIX,
    "vocab": f"is a vocabulary without a model; {_MODEL}",
    **dict.fromkeys(("mmproj", "clip-vision"), _ENCODER),
}
_ARCHITECTURES = {"clip": _ENCODER, "controlvector": _VECTOR, "imatrix": _IMATRIX}
_RANKS = 4  # llama.cpp's LLAMA_POOLING_TYPE_RANK; other types make an embedding of a text


def check_kind(where: str, metadata: Mapping[str, Any]) -> None:
    """Raise BuildError if the metadata, complete or not, is of a file that is no text generation model."""
    architecture = str(metadata.get("general.architecture"))
    lora = _LORA if "adapter.type" in metadata else None
    if known := _TYPES.get(str(metadata.get("general.type"))) or _ARCHITECTURES.get(architecture) or lora:
        raise BuildError(f"{where}: {known}")
    if any(key.startswith(f"{architecture}.vision.") for key in metadata):
        raise BuildError(f"{where}: {_OLLAMAS}")
    pooling, causal = (f"{architecture}.{name}" for name in ("pooling_type", "attention.causal"))
    if kind := metadata.get(pooling):
        raise _not_of_text(where, pooling, kind, "a reranker" if kind == _RANKS else "an embedding model")
    if metadata.get(causal) is False:
        raise _not_of_text(where, causal, False, "an encoder")


def _not_of_text(where: str, key: str, value: object, what: str) -> BuildError:
    return BuildError(f"{where}: `{key}` is {value!r:.20}: it is {what}; give a model that generates text")
