"""Read what GGUF files say about experts that are scored as in DeepSeek's models (model/expert_scores.py)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from shortfin_apps.llm.builder.sources.base import unsupported

# Keys without the prefix `ARCHITECTURE.` that only these models use, or use in another way than others.
EXPERT_KEYS: Final = frozenset(
    {
        *("leading_dense_block_count", "expert_shared_count", "expert_weights_scale"),
        *("expert_weights_norm", "expert_gating_func", "expert_group_count", "expert_group_used_count"),
    }
)
_SCORES = {0: "softmax", 1: "softmax", 2: "sigmoid"}  # by `expert_gating_func`; 0: the default


def expert_fields(where: str, keys: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return fields of a Config. Raises BuildError; `names`: of the file's tensors."""
    gating = keys.get("expert_gating_func", 0)
    if gating not in _SCORES:
        raise unsupported(where, f"a router of kind {gating} (`expert_gating_func`)")
    has_bias = any(name.endswith(".exp_probs_b.bias") for name in names)
    groups = keys.get("expert_group_count") or 1
    return {
        "first_k_dense_replace": keys.get("leading_dense_block_count", 0),
        "n_shared_experts": keys.get("expert_shared_count", 0),
        "routed_scaling_factor": keys.get("expert_weights_scale") or 1.0,
        "norm_topk_prob": bool(keys.get("expert_weights_norm", False)),
        "scoring_func": _SCORES[gating],
        "topk_method": "noaux_tc" if has_bias else "group_limited_greedy" if groups > 1 else "greedy",
        "n_group": groups,
        "topk_group": keys.get("expert_group_used_count") or 1,
    }
