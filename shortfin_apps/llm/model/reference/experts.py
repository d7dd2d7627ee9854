"""Routed experts, token by token."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.model.feed_forward import MoE
from shortfin_apps.llm.model.reference.pointwise import gated

F32 = npt.NDArray[np.float32]


def routed(experts: MoE, x: F32, block: Mapping[str, F32]) -> F32:
    chosen, weights = route(
        experts, x @ block["ffn_gate_inp.weight"].T + block.get("ffn_gate_inp.bias", np.float32(0))
    )
    gate_up, down = (_projections(block, f"ffn_{name}_exps") for name in ("gate_up", "down"))
    out = np.zeros_like(x)
    for token, its_experts in enumerate(chosen):
        for expert, weight in zip(its_experts, weights[token], strict=True):
            both = gate_up[0][expert] @ x[token] + gate_up[1][expert]
            out[token] += weight * (down[0][expert] @ gated(experts.activation, both) + down[1][expert])
    if experts.shared:
        gates = 1 / (1 + np.exp(-x @ block["ffn_gate_inp_shexp.weight"].T))
        shared = (
            gated(experts.activation, x @ block["ffn_gate_up_shexp.weight"].T)
            @ block["ffn_down_shexp.weight"].T
        )
        out += gates * shared
    return out


def _projections(block: Mapping[str, F32], name: str) -> tuple[F32, F32]:
    """Return the weights [experts, out, in] and biases [experts, out]."""
    weight = block[f"{name}.weight"]
    return weight, block.get(f"{name}.bias", np.zeros(weight.shape[:2], np.float32))


def route(experts: MoE, logits: F32) -> tuple[npt.NDArray[np.int64], F32]:
    """Return each token's experts, most likely first, and their weights [tokens, experts per token]."""
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    chosen = np.argsort(-logits, axis=-1, kind="stable")[:, : experts.per_token]
    weights = np.take_along_axis(shares, chosen, axis=-1)
    return chosen, weights / weights.sum(axis=-1, keepdims=True) if experts.is_normalised else weights
