"""The text model in a Hugging Face directory of a model for images or sound.

The fields of the text model are in `text_config` of `config.json`. Its tensors have a prefix that names the
text model, which depends on the family and on the version of transformers. Other tensors are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from shortfin_apps.llm.builder.sources.base import unsupported
from shortfin_apps.llm.model.families import FAMILIES

# Prefixes of the text model's tensors -> prefix in a directory of the text model alone.
_TEXT = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_OTHER_PARTS = re.compile(
    r"(model\.)?(vision_tower|visual|vision_embedder|audio_tower|multi_modal_projector|embed_vision|embed_audio)\."
)
# Fields that apply to the text model if `text_config` lacks them.
_OF_ALL_PARTS = ("quantization_config", "dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")


def text_config(where: str, raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the text model in a `config.json`, which are all of them if it has no other parts.

    `where` names the model in errors. Raises BuildError if no supported family is the text model of `raw`.
    """
    whole, text = raw.get("model_type"), raw.get("text_config")
    families = [family for family in FAMILIES if family.part_of == whole and whole is not None]
    if not isinstance(text, dict) or not families:
        if "vision_config" in raw or "audio_config" in raw:
            raise unsupported(where, f"a vision or audio tower (`{whole}`)")
        return raw
    inherited = {name: raw[name] for name in _OF_ALL_PARTS if raw.get(name) is not None}
    text = {"model_type": families[0].model_type, **inherited, **text}
    if text["model_type"] not in {family.model_type for family in families}:
        raise unsupported(where, f"`{whole}` with a text model `{text['model_type']}`")
    return text


def text_name(name: str) -> str | None:
    """Return the tensor's name in a directory of the text model alone; None for tensors of other parts."""
    if _OTHER_PARTS.match(name):
        return None
    for prefix, alone in _TEXT.items():
        if name.startswith(prefix):
            return alone + name.removeprefix(prefix)
    return name


def described(headers: Iterable[Any]) -> str:
    """Describe to users the tensors with these safetensors headers."""
    sizes = [prod(header.get_shape()) * _bits(header.get_dtype()) // 8 for header in headers]
    return f"{len(sizes)} tensors, {sum(sizes) / 1e6:,.1f} MB"


def _bits(dtype: str) -> int:
    """Return the bits of an element of a safetensors type, such as BF16 or F8_E4M3."""
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8
