"""The feed-forward blocks: one for all tokens, and routed experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shortfin_apps.llm.model.operations import (
    Activation,
    AddBias,
    AddNormed,
    GatedExperts,
    GatedLinear,
    GateTokens,
    Linear,
    ModelTensor,
    Operation,
    Route,
    SumExperts,
    norm_before,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLP:
    """A gated feed-forward of `features` elements between its projections, plus its input."""

    features: int
    activation: Activation = "silu"
    norm_before: bool = True
    norm_after: bool = False  # norm of the result before adding it
    fused_gate_up: bool = False  # gate and up are one tensor of the source

    @property
    def kv_layout(self) -> None:
        """It stores nothing."""

    def tensors(self, hidden: int) -> Iterator[ModelTensor]:
        """List the tensors; gate and up are stacked."""
        if self.norm_before:
            yield ModelTensor("ffn_norm.weight", (hidden,))
        if self.fused_gate_up:
            yield ModelTensor("ffn_gate_up.weight", (2 * self.features, hidden))
        else:
            yield ModelTensor("ffn_gate.weight", (self.features, hidden), "ffn_gate_up.weight")
            yield ModelTensor("ffn_up.weight", (self.features, hidden), "ffn_gate_up.weight")
        yield ModelTensor("ffn_down.weight", (hidden, self.features))
        if self.norm_after:
            yield ModelTensor("post_ffw_norm.weight", (hidden,))

    def operations(self, layer: int, x: str, out: str) -> Iterator[Operation]:
        """List the operations from the residual stream `x` to `out`."""
        prefix = f"blk.{layer}."
        yield norm_before(x, f"{prefix}ffn_norm.weight" if self.norm_before else None)
        yield GatedLinear("normed", "gated", f"{prefix}ffn_gate_up.weight", self.activation)
        if not self.norm_after:
            yield Linear("gated", out, f"{prefix}ffn_down.weight", residual=x)
            return
        yield Linear("gated", "down", f"{prefix}ffn_down.weight")
        yield AddNormed("down", out, f"{prefix}post_ffw_norm.weight", x)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoE:
    """Routed experts, each a gated feed-forward of `features` elements, plus their input.

    A token takes the `per_token` largest of the softmax over all `count` router logits, with ties to the
    lower index; they are rescaled to add up to 1 if `is_normalised`. With `biases`, the router and every
    projection of an expert have a bias. With `shared`, all tokens also use an expert of `shared` features,
    times the sigmoid of a gate, a scalar per token.
    """

    count: int
    per_token: int
    features: int
    is_normalised: bool = True
    activation: Activation = "silu"
    biases: bool = False
    shared: int | None = None
    norm_before: bool = True

    @property
    def kv_layout(self) -> None:
        """It stores nothing."""

    def tensors(self, hidden: int) -> Iterator[ModelTensor]:
        """List the tensors; the experts' matrices are stacked."""
        if self.norm_before:
            yield ModelTensor("ffn_norm.weight", (hidden,))
        yield ModelTensor("ffn_gate_inp.weight", (self.count, hidden))
        if self.biases:
            yield ModelTensor("ffn_gate_inp.bias", (self.count,))
        for kinds, stack, shape in (
            (("gate", "up"), "ffn_gate_up_exps", (self.features, hidden)),
            (("down",), "ffn_down_exps", (hidden, self.features)),
        ):
            yield from self._of_experts(kinds, f"{stack}.weight", shape)
            if self.biases:
                yield from self._of_experts(kinds, f"{stack}.bias", shape[:1])
        if self.shared:
            yield ModelTensor("ffn_gate_inp_shexp.weight", (1, hidden))
            yield ModelTensor("ffn_gate_shexp.weight", (self.shared, hidden), "ffn_gate_up_shexp.weight")
            yield ModelTensor("ffn_up_shexp.weight", (self.shared, hidden), "ffn_gate_up_shexp.weight")
            yield ModelTensor("ffn_down_shexp.weight", (hidden, self.shared))

    def _of_experts(self, kinds: Sequence[str], weight: str, shape: tuple[int, ...]) -> Iterator[ModelTensor]:
        """List the tensors of every expert that are stacked into `weight`."""
        suffix = weight.rpartition(".")[2]
        for number in range(self.count):
            for kind in kinds:
                yield ModelTensor(f"ffn_{kind}.{number}.{suffix}", shape, weight, expert=number)

    def operations(self, layer: int, x: str, out: str) -> Iterator[Operation]:
        """List the operations from the residual stream `x` to `out`."""
        prefix = f"blk.{layer}."
        yield norm_before(x, f"{prefix}ffn_norm.weight" if self.norm_before else None)
        if self.shared:
            yield GatedLinear("normed", "shared", f"{prefix}ffn_gate_up_shexp.weight", self.activation)
            yield Linear("normed", "gates", f"{prefix}ffn_gate_inp_shexp.weight")
            yield GateTokens("shared", "shared", "gates")
            yield Linear("shared", x, f"{prefix}ffn_down_shexp.weight", residual=x)
        yield Linear("normed", "router", f"{prefix}ffn_gate_inp.weight")
        gate_up_bias = down_bias = None
        if self.biases:
            yield AddBias("router", "router", f"{prefix}ffn_gate_inp.bias")
            gate_up_bias, down_bias = (f"{prefix}ffn_{name}_exps.bias" for name in ("gate_up", "down"))
        yield Route("router", "routing")
        gate_up, down = (f"{prefix}ffn_{name}_exps.weight" for name in ("gate_up", "down"))
        yield GatedExperts("normed", "gated", gate_up, "routing", gate_up_bias)
        yield SumExperts("gated", out, down, "routing", x, down_bias)
