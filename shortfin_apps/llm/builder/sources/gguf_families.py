"""What an architecture of GGUF files implies that no key says, or says in keys of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFamily:
    """The differences from Llama, as llama.cpp has them. Biases may also be told by their tensors."""

    has_pairs: bool = False  # rows of q and k that rotate together are neighbours
    qkv_bias: bool = False
    qk_norm: bool = False
    has_fused_tensors: bool = False
    finetuned_rotates: bool = False  # `rope.scaling.finetuned` false means that nothing rotates
    unrotated_interval: int | None = None  # the last of each so many layers does not rotate
    keys: frozenset[str] = frozenset()  # that Llama refuses unless they are neutral
    renamed: Mapping[str, str] = field(default_factory=dict)  # kinds of tensors that go by another name here

    def unrotated_layers(self, layers: int) -> tuple[int, ...]:
        interval = self.unrotated_interval
        return () if interval is None else tuple(range(interval - 1, layers, interval))


GGUF_FAMILIES: Mapping[str, GgufFamily] = {
    "granite": GgufFamily(
        has_pairs=True,
        finetuned_rotates=True,
        keys=frozenset({"embedding_scale", "residual_scale", "attention.scale", "logit_scale"}),
    ),
    "llama": GgufFamily(has_pairs=True),
    "phi3": GgufFamily(has_fused_tensors=True, renamed={"ffn_up": "ffn_gate_up"}),
    "qwen2": GgufFamily(qkv_bias=True),
    "qwen3": GgufFamily(qk_norm=True),
    "smollm3": GgufFamily(has_pairs=True, unrotated_interval=4),
}
