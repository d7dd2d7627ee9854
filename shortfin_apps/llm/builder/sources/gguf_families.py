"""Properties of GGUF architectures that no key states, or that architecture-specific keys state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shortfin_apps.llm.model.operations import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFamily:
    """The differences from Llama, as in llama.cpp. Tensors may also show that there are biases."""

    has_pairs: bool = False  # rows of q and k that rotate together are neighbours
    qkv_bias: bool = False
    qk_norm: bool = False
    whole_qk_norm: bool = False
    norms_before: bool = True
    norms_after: bool = False
    activation: Activation = "silu"
    scales_embedding: bool = False  # by the square root of embedding_length
    scaled_by_width: int | None = (
        None  # number of layers of the model size with a different scale of scores (see `score_scale`)
    )
    window_interval: int | None = None  # all but the last of each interval have the window; None: all layers
    local_rope_theta: float | None = None  # for windowed layers, if no key has it
    has_fused_tensors: bool = False  # q, k and v are one tensor, gate and up another
    has_experts: bool = False
    has_expert_biases: bool = False
    has_shared_expert: bool = False
    has_sinks: bool = False
    yarn_truncates: bool = True  # rounds the bounds of the slowed frequencies to an index
    has_delta_nets: bool = False  # in all but the last of every interval of layers; the last has gates
    tiles_value_heads: bool = True  # in the order in which llama.cpp repeats key heads
    has_fused_rates: bool = False  # b and a of delta nets are one tensor
    finetuned_rotates: bool = False  # `rope.scaling.finetuned` = false disables rotation
    unrotated_interval: int | None = None  # the last of every this many layers does not rotate
    keys: frozenset[str] = frozenset()  # extra keys, which Llama rejects unless they are neutral
    renamed: Mapping[str, str] = field(default_factory=dict)  # the file's tensor kinds -> our names

    def score_scale(self, layers: int, hidden: int, heads: int) -> float | None:
        """Return the replacement of 1 / sqrt(head_dim), which llama.cpp selects by the model's size."""
        return (hidden / heads) ** -0.5 if layers == self.scaled_by_width else None

    def windowed_layers(self, layers: int, interval: int | None) -> tuple[int, ...]:
        """Return the layers with a window; `interval` is the file's, if it has one."""
        of_each = interval or self.window_interval
        return tuple(layer for layer in range(layers) if of_each is None or (layer + 1) % of_each)

    def unrotated_layers(self, layers: int) -> tuple[int, ...]:
        interval = self.unrotated_interval
        return () if interval is None else tuple(range(interval - 1, layers, interval))


_EXPERT_KEYS = frozenset({"expert_used_count", "expert_feed_forward_length"})
_DELTA_NET_KEYS = frozenset(
    {
        *("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank"),
        *("ssm.inner_size", "full_attention_interval", "nextn_predict_layers"),
    }
)
_GEMMA_KEYS = frozenset({"attn_logit_softcapping", "final_logit_softcapping"})

GGUF_FAMILIES: Mapping[str, GgufFamily] = {
    "gemma2": GgufFamily(
        norms_after=True,
        activation="gelu",
        scales_embedding=True,
        scaled_by_width=46,  # 27B
        window_interval=2,
        keys=_GEMMA_KEYS,
    ),
    "gemma3": GgufFamily(
        qk_norm=True,
        norms_after=True,
        activation="gelu",
        scales_embedding=True,
        scaled_by_width=62,  # 27B
        window_interval=6,
        local_rope_theta=10000.0,
        keys=_GEMMA_KEYS | {"attention.sliding_window_pattern", "rope.freq_base_swa"},
    ),
    "gpt-oss": GgufFamily(
        has_experts=True,
        has_expert_biases=True,
        has_sinks=True,
        activation="clamped",
        window_interval=2,
        yarn_truncates=False,
        renamed={"post_attention_norm": "ffn_norm"},
        keys=frozenset({"expert_used_count", "expert_feed_forward_length"}),
    ),
    "granite": GgufFamily(
        has_pairs=True,
        finetuned_rotates=True,
        keys=frozenset({"embedding_scale", "residual_scale", "attention.scale", "logit_scale"}),
    ),
    "llama": GgufFamily(has_pairs=True, has_experts=True, keys=_EXPERT_KEYS),  # Mixtral too
    "olmo2": GgufFamily(whole_qk_norm=True, norms_before=False, norms_after=True),
    "phi3": GgufFamily(has_fused_tensors=True, renamed={"ffn_up": "ffn_gate_up"}),
    "qwen2": GgufFamily(qkv_bias=True),
    "qwen3": GgufFamily(qk_norm=True),
    "qwen3moe": GgufFamily(
        qk_norm=True,
        has_experts=True,
        keys=_EXPERT_KEYS,
    ),
    "qwen35": GgufFamily(
        qk_norm=True,
        has_delta_nets=True,
        renamed={"post_attention_norm": "ffn_norm"},
        keys=_DELTA_NET_KEYS,
    ),
    "qwen35moe": GgufFamily(
        qk_norm=True,
        has_delta_nets=True,
        has_experts=True,
        has_shared_expert=True,
        renamed={"post_attention_norm": "ffn_norm"},
        keys=_DELTA_NET_KEYS | _EXPERT_KEYS | {"expert_shared_feed_forward_length"},
    ),
    "qwen3next": GgufFamily(
        qk_norm=True,
        has_delta_nets=True,
        tiles_value_heads=False,
        has_fused_rates=True,
        has_experts=True,
        has_shared_expert=True,
        renamed={"post_attention_norm": "ffn_norm"},
        keys=_DELTA_NET_KEYS | _EXPERT_KEYS | {"expert_shared_feed_forward_length"},
    ),
    "smollm3": GgufFamily(has_pairs=True, unrotated_interval=4),
}
