"""The feed-forward blocks: dense (MLP), and routed experts (MoE)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.model.block import Block, ReferenceLayer
from shortfin_apps.llm.model.expert_scores import ExpertScores, PreferExperts, ScoreExperts
from shortfin_apps.llm.model.operations import (
    Activate,
    Activation,
    AddBias,
    AddNormed,
    GatedLinear,
    Linear,
    ModelTensor,
    Operation,
    norm_before,
)
from shortfin_apps.llm.model.reference.pointwise import F32, gated


@dataclass(frozen=True, slots=True, kw_only=True)
class MLP(Block):
    """A gated feed-forward with a residual connection; `features`: its intermediate size."""

    KIND: ClassVar[str] = "gated feed-forwards"
    features: int
    activation: Activation = "silu"
    norm_before: bool = True
    norm_after: bool = False  # norm of the output before the residual addition
    fused_gate_up: bool = False  # the source has one tensor for gate and up
    biases: bool = False  # all projections have a bias

    @property
    def vector_sizes(self) -> dict[str, int]:
        return {"intermediate_size": self.features}

    def tensors(self, hidden: int) -> Iterator[ModelTensor]:
        """List the tensors; gate and up are stacked."""
        if self.norm_before:
            yield ModelTensor("ffn_norm.weight", (hidden,))
        if self.fused_gate_up:
            yield ModelTensor("ffn_gate_up.weight", (2 * self.features, hidden))
        else:
            yield ModelTensor("ffn_gate.weight", (self.features, hidden), "ffn_gate_up.weight")
            yield ModelTensor("ffn_up.weight", (self.features, hidden), "ffn_gate_up.weight")
        if self.biases:
            yield ModelTensor("ffn_gate.bias", (self.features,), "ffn_gate_up.bias")
            yield ModelTensor("ffn_up.bias", (self.features,), "ffn_gate_up.bias")
        yield ModelTensor("ffn_down.weight", (hidden, self.features))
        if self.biases:
            yield ModelTensor("ffn_down.bias", (hidden,))
        if self.norm_after:
            yield ModelTensor("post_ffw_norm.weight", (hidden,))

    def operations(self, layer: int, x: str, out: str) -> Iterator[Operation]:
        """List the operations that read the residual stream `x` and write the new one to `out`."""
        prefix = f"blk.{layer}."
        yield norm_before(x, f"{prefix}ffn_norm.weight" if self.norm_before else None)
        if self.biases:
            yield Linear("normed", "both", f"{prefix}ffn_gate_up.weight")
            yield AddBias("both", "both", f"{prefix}ffn_gate_up.bias")
            yield Activate("both", "gated", self.activation)
        else:
            yield GatedLinear("normed", "gated", f"{prefix}ffn_gate_up.weight", self.activation)
        down, residual = ("down", None) if self.norm_after else (out, x)
        yield Linear("gated", down, f"{prefix}ffn_down.weight", residual)
        if self.biases:
            yield AddBias(down, down, f"{prefix}ffn_down.bias")
        if self.norm_after:
            yield AddNormed(down, out, f"{prefix}post_ffw_norm.weight", x)

    def compute(self, x: F32, layer: ReferenceLayer) -> F32:
        weights, none = layer.weights, np.float32(0)
        both = layer.normed(x, "ffn_norm.weight") @ weights["ffn_gate_up.weight"].T
        both += weights.get("ffn_gate_up.bias", none)
        added = gated(self.activation, both) @ weights["ffn_down.weight"].T
        added += weights.get("ffn_down.bias", none)
        return layer.normed(added, "post_ffw_norm.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoE(Block):
    """Routed experts with a residual connection; each expert is a gated feed-forward.

    `count`: experts; `per_token`: experts per token; `features`: intermediate size of an expert.
    A token uses the experts with the largest router logits; on ties, lower indices first. Their weights are
    the softmax over all router logits, rescaled to a sum of 1 if `is_normalised`. `biases`: the router and
    all projections of experts have a bias. `scores` replaces the softmax: weights are its scores, and a token
    uses the experts that it prefers. `scale`: a factor of all weights. `shared`: intermediate size of an
    additional expert for all tokens; if `gates_shared`, its result is multiplied by sigmoid(gate), where a
    learned projection computes a scalar gate per token.
    """

    KIND: ClassVar[str] = "routed experts"
    count: int
    per_token: int
    features: int
    is_normalised: bool = True
    activation: Activation = "silu"
    biases: bool = False
    scores: ExpertScores | None = None
    scale: float = 1.0
    shared: int | None = None
    gates_shared: bool = True
    norm_before: bool = True

    @property
    def vector_sizes(self) -> dict[str, int]:
        return {"size of an expert": self.features, "size of the shared expert": self.shared or 0}

    def tensors(self, hidden: int) -> Iterator[ModelTensor]:
        """List the tensors; the experts' matrices are stacked."""
        if self.norm_before:
            yield ModelTensor("ffn_norm.weight", (hidden,))
        if self.shared:
            yield ModelTensor("ffn_gate_shexp.weight", (self.shared, hidden), "ffn_gate_up_shexp.weight")
            yield ModelTensor("ffn_up_shexp.weight", (self.shared, hidden), "ffn_gate_up_shexp.weight")
            if self.gates_shared:
                yield ModelTensor("ffn_gate_inp_shexp.weight", (1, hidden), stored="floats")  # one row
            yield ModelTensor("ffn_down_shexp.weight", (hidden, self.shared))
        # Stored as floats: the router is small, and rounding errors could select other experts.
        yield ModelTensor("ffn_gate_inp.weight", (self.count, hidden), stored="floats")
        if self.biases:
            yield ModelTensor("ffn_gate_inp.bias", (self.count,))
        if self.scores and self.scores.bias:
            yield ModelTensor("exp_probs_b.bias", (self.count,))
        for kinds, stack, shape in (
            (("gate", "up"), "ffn_gate_up_exps", (self.features, hidden)),
            (("down",), "ffn_down_exps", (hidden, self.features)),
        ):
            yield from self._of_experts(kinds, f"{stack}.weight", shape)
            if self.biases:
                yield from self._of_experts(kinds, f"{stack}.bias", shape[:1])

    def _of_experts(self, kinds: Sequence[str], weight: str, shape: tuple[int, ...]) -> Iterator[ModelTensor]:
        """List the tensors of all experts that are stacked into the stored weight `weight`."""
        suffix = weight.rpartition(".")[2]
        for number in range(self.count):
            for kind in kinds:
                yield ModelTensor(f"ffn_{kind}.{number}.{suffix}", shape, weight, expert=number)

    def operations(self, layer: int, x: str, out: str) -> Iterator[Operation]:
        """List the operations that read the residual stream `x` and write the new one to `out`."""
        prefix = f"blk.{layer}."
        yield norm_before(x, f"{prefix}ffn_norm.weight" if self.norm_before else None)
        if self.shared:
            yield GatedLinear("normed", "shared", f"{prefix}ffn_gate_up_shexp.weight", self.activation)
            if self.gates_shared:
                yield Linear("normed", "gates", f"{prefix}ffn_gate_inp_shexp.weight")
                yield GateTokens("shared", "shared", "gates")
            yield Linear("shared", x, f"{prefix}ffn_down_shexp.weight", residual=x)
        yield Linear("normed", "router", f"{prefix}ffn_gate_inp.weight")
        gate_up_bias = down_bias = None
        if self.biases:
            yield AddBias("router", "router", f"{prefix}ffn_gate_inp.bias")
            gate_up_bias, down_bias = (f"{prefix}ffn_{name}_exps.bias" for name in ("gate_up", "down"))
        if self.scores is None:
            yield Route("router", "routing")
        else:
            bias = f"{prefix}exp_probs_b.bias" if self.scores.bias else None
            yield ScoreExperts("router", "scores", self.scores)
            yield PreferExperts("scores", "preferences", self.scores, bias)
            yield Route("preferences", "routing", "scores")
        gate_up, down = (f"{prefix}ffn_{name}_exps.weight" for name in ("gate_up", "down"))
        yield GatedExperts("normed", "gated", gate_up, "routing", gate_up_bias)
        yield SumExperts("gated", out, down, "routing", x, down_bias)

    def compute(self, x: F32, layer: ReferenceLayer) -> F32:
        weights, h = layer.weights, layer.normed(x, "ffn_norm.weight")
        bias = weights.get("ffn_gate_inp.bias", np.float32(0))
        routing = route(self, h @ weights["ffn_gate_inp.weight"].T + bias, weights.get("exp_probs_b.bias"))
        out = sum_of_experts(self, h, *routing, weights)
        if self.shared:
            both = h @ weights["ffn_gate_up_shexp.weight"].T
            shared = gated(self.activation, both) @ weights["ffn_down_shexp.weight"].T
            if self.gates_shared:
                shared *= 1 / (1 + np.exp(-h @ weights["ffn_gate_inp_shexp.weight"].T))
            out += shared
        return out


def sum_of_experts(
    experts: MoE, h: F32, chosen: npt.NDArray[np.int64], shares: F32, weights: Mapping[str, F32]
) -> F32:
    """Return the weighted sum of each token's experts, of their input `h` and `route`'s results."""
    gate_up, down = (_projections(weights, f"ffn_{name}_exps") for name in ("gate_up", "down"))
    out = np.zeros_like(h)
    for token, its_experts in enumerate(chosen):
        for expert, share in zip(its_experts, shares[token], strict=True):
            both = gate_up[0][expert] @ h[token] + gate_up[1][expert]
            out[token] += share * (down[0][expert] @ gated(experts.activation, both) + down[1][expert])
    return out


def _projections(weights: Mapping[str, F32], name: str) -> tuple[F32, F32]:
    """Return a projection's weights [experts, out, in] and biases [experts, out] (zeros if it has none)."""
    weight = weights[f"{name}.weight"]
    return weight, weights.get(f"{name}.bias", np.zeros(weight.shape[:2], np.float32))


def route(experts: MoE, logits: F32, bias: F32 | None = None) -> tuple[npt.NDArray[np.int64], F32]:
    """Return each token's experts, most likely first, and their weights; both [tokens, per_token].

    `bias` [experts]: of ExpertScores.
    """
    shares = (experts.scores or ExpertScores(is_sigmoid=False)).scores(logits)
    preferred = logits if experts.scores is None else experts.scores.preferences(shares, bias)
    chosen = np.argsort(-preferred, axis=-1, kind="stable")[:, : experts.per_token]
    weights = np.take_along_axis(shares, chosen, axis=-1)
    if experts.is_normalised:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return chosen, weights * np.float32(experts.scale)


@dataclass(frozen=True, slots=True)
class Route(Operation):
    """Router logits [tokens, experts] f32 -> each token's experts and their weights (see MoE).

    Only ScaleRouting, GatedExperts and SumExperts read the result, whose format each lowering defines.
    Padding tokens have no experts. With `scores` [tokens, experts] f32, `x` are the preferences by which
    experts are chosen, and their weights are these scores, not a softmax of `x`.
    """

    READS: ClassVar = ("x", "scores")
    scores: str | None = None


@dataclass(frozen=True, slots=True)
class ScaleRouting(Operation):
    """Route's result -> the same, with each weight times a factor of its expert.

    `weight`: the factors, [experts] f32. There is no sum here, so that all entries compute the same bits.
    """

    weight: str


@dataclass(frozen=True, slots=True)
class GatedExperts(Operation):
    """[tokens, in] -> [tokens * experts per token, out / 2]: each token's GatedLinear by each of its experts.

    Results are in the matmuls' activation type; a token's most likely expert comes first. `weight`:
    [experts, out, in]; `bias` [experts, out] f32: added before the activation; `routing`: Route's or
    ScaleRouting's result. Weights of experts that no token uses are not read. Results for padding tokens are
    undefined.
    """

    READS: ClassVar = ("x", "routing")
    weight: str
    routing: str
    bias: str | None = None


@dataclass(frozen=True, slots=True)
class SumExperts(Operation):
    """[tokens * experts per token, in] -> [tokens, out] f32: weighted sum over the experts, plus `residual`.

    An expert's result is `x` times the transpose of its matrix, plus its bias. It is multiplied by the
    expert's routing weight, and a token's most likely expert is added first. `weight`: [experts, out, in];
    `bias`: [experts, out] f32. Padding tokens get only the residual.
    """

    READS: ClassVar = ("x", "routing", "residual")
    weight: str
    routing: str
    residual: str
    bias: str | None = None


@dataclass(frozen=True, slots=True)
class GateTokens(Operation):
    """[tokens, features] -> the same shape and type: `x` times the sigmoid of `gates` [tokens, 1] f32."""

    READS: ClassVar = ("x", "gates")
    gates: str
