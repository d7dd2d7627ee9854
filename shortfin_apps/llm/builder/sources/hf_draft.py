"""The names of a draft layer's tensors in Hugging Face files.

DeepSeek's files have draft layers after the last layer. Qwen's have them under `mtp.`, which are renamed here
to DeepSeek's names.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from shortfin_apps.llm.model.families.family import Family
from shortfin_apps.llm.model.spec import ModelSpec

# DeepSeek's names of the tensors that only draft layers have -> names as in GGUF files.
NAMES = {
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "eh_proj": "nextn.eh_proj",
    "shared_head.norm": "nextn.shared_head_norm",
}
_QWEN = {
    "mtp.pre_fc_norm_embedding": "enorm",
    "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.fc": "eh_proj",
    "mtp.norm": "shared_head.norm",
}
_LAYER = re.compile(r"mtp\.layers\.(\d+)\.(.+)")
_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)")
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # of the model's embedding and head


def in_layers(name: str, num_layers: int) -> str:
    """Return a tensor's name, in which draft layers are numbered after the model's `num_layers` layers."""
    if match := _LAYER.fullmatch(name):
        return f"model.layers.{num_layers + int(match[1])}.{match[2]}"
    stem, _, kind = name.rpartition(".")
    return f"model.layers.{num_layers}.{_QWEN[stem]}.{kind}" if stem in _QWEN else name


def is_left_out(spec: ModelSpec, name: str) -> bool:
    """Return whether the tensor, named by `in_layers`, belongs to a draft layer that `spec` lacks."""
    match = _BLOCK.fullmatch(name)
    return name.startswith("mtp.") if match is None else int(match[1]) >= len(spec.all_layers)


def is_copy(spec: ModelSpec, name: str) -> bool:
    """Return whether the tensor is the draft layer's copy of the model's embedding or head."""
    match = _BLOCK.fullmatch(name)
    return match is not None and int(match[1]) >= len(spec.layers) and match[2] in _COPIES


def has_draft_layer(family: Family, names: Collection[str]) -> bool:
    """Return whether files with these tensors have a draft layer that can be built.

    A layer with its own embedding cannot.
    """
    if family.draft is None or "mtp.embed_tokens.weight" in names:
        return False
    return "mtp.fc.weight" in names or any(name.endswith(".eh_proj.weight") for name in names)
