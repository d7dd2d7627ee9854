"""Routed experts next to a feed-forward that all tokens use, as in Gemma 4 26B-A4B."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from shortfin_apps.llm.model.block import ReferenceLayer
from shortfin_apps.llm.model.feed_forward import (
    GatedExperts,
    MoE,
    Route,
    ScaleRouting,
    SumExperts,
    route,
    sum_of_experts,
)
from shortfin_apps.llm.model.operations import (
    AddNormed,
    GatedLinear,
    Linear,
    ModelTensor,
    Norm,
    Operation,
)
from shortfin_apps.llm.model.reference.pointwise import F32, gated

EXPERT_SCALES = "ffn_down_exps.scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class DualExperts(MoE):
    """A feed-forward of `dense` features and routed experts, both of the same residual stream.

    Each has a norm of its input and of its output. The sum of both outputs is normed once more and added. The
    router has another norm of the residual stream, whose weight is divided by sqrt(hidden). Each expert has a
    factor of its weights (EXPERT_SCALES).
    """

    KIND: ClassVar[str] = "routed experts next to a feed-forward"
    dense: int

    @property
    def vector_sizes(self) -> dict[str, int]:
        return {"intermediate_size": self.dense, "size of an expert": self.features}

    def tensors(self, hidden: int) -> Iterator[ModelTensor]:
        """List the tensors; the experts' matrices are stacked."""
        yield ModelTensor("ffn_norm.weight", (hidden,))
        yield ModelTensor("ffn_gate.weight", (self.dense, hidden), "ffn_gate_up.weight")
        yield ModelTensor("ffn_up.weight", (self.dense, hidden), "ffn_gate_up.weight")
        yield ModelTensor("ffn_down.weight", (hidden, self.dense))
        yield ModelTensor("post_ffw_norm_1.weight", (hidden,))
        yield ModelTensor("ffn_gate_inp_norm.weight", (hidden,), scale=hidden**-0.5)
        yield ModelTensor("ffn_gate_inp.weight", (self.count, hidden), stored="floats")
        yield ModelTensor(EXPERT_SCALES, (self.count,))
        yield ModelTensor("pre_ffw_norm_2.weight", (hidden,))
        shape = (self.features, hidden)
        yield from self._of_experts(("gate", "up"), "ffn_gate_up_exps.weight", shape)
        yield from self._of_experts(("down",), "ffn_down_exps.weight", shape[::-1])
        yield ModelTensor("post_ffw_norm_2.weight", (hidden,))
        yield ModelTensor("post_ffw_norm.weight", (hidden,))

    def operations(self, layer: int, x: str, out: str) -> Iterator[Operation]:
        """List the operations that read the residual stream `x` and write the new one to `out`."""
        prefix = f"blk.{layer}."
        yield Norm(x, "normed", f"{prefix}ffn_norm.weight")
        yield GatedLinear("normed", "gated", f"{prefix}ffn_gate_up.weight", self.activation)
        yield Linear("gated", "down", f"{prefix}ffn_down.weight")
        yield Zeros(x, "zeros")
        yield AddNormed("down", "dense", f"{prefix}post_ffw_norm_1.weight", "zeros")
        yield Norm(x, "normed", f"{prefix}ffn_gate_inp_norm.weight")
        yield Linear("normed", "router", f"{prefix}ffn_gate_inp.weight")
        yield Route("router", "routing")
        yield ScaleRouting("routing", "routing", f"{prefix}{EXPERT_SCALES}")
        yield Norm(x, "normed", f"{prefix}pre_ffw_norm_2.weight")
        yield GatedExperts("normed", "gated", f"{prefix}ffn_gate_up_exps.weight", "routing")
        yield SumExperts("gated", "experts", f"{prefix}ffn_down_exps.weight", "routing", "zeros")
        yield AddNormed("experts", "both", f"{prefix}post_ffw_norm_2.weight", "dense")
        yield AddNormed("both", out, f"{prefix}post_ffw_norm.weight", x)

    def compute(self, x: F32, layer: ReferenceLayer) -> F32:
        weights = layer.weights
        both = layer.normed(x, "ffn_norm.weight") @ weights["ffn_gate_up.weight"].T
        dense = gated(self.activation, both) @ weights["ffn_down.weight"].T
        router = layer.normed(x, "ffn_gate_inp_norm.weight") @ weights["ffn_gate_inp.weight"].T
        chosen, shares = route(self, router)
        shares *= weights[EXPERT_SCALES][chosen]
        experts = sum_of_experts(self, layer.normed(x, "pre_ffw_norm_2.weight"), chosen, shares, weights)
        added = layer.normed(dense, "post_ffw_norm_1.weight")
        added = added + layer.normed(experts, "post_ffw_norm_2.weight")
        return layer.normed(added.astype(np.float32), "post_ffw_norm.weight")


@dataclass(frozen=True, slots=True)
class Zeros(Operation):
    """[tokens, hidden] f32 -> zeros of the same shape."""
