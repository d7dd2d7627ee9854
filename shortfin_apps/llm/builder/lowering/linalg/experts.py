"""Routed experts in linalg, one token and expert at a time, for targets without hand-written kernels.

An expert's matrix is read again for each of its tokens. Matrices of experts without tokens are not read.
"""

from __future__ import annotations

from dataclasses import dataclass

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.linalg.bodies import gated
from shortfin_apps.llm.builder.lowering.linalg.top_k import top_k
from shortfin_apps.llm.builder.lowering.lowering import Kernels, LoweringContext


@dataclass(frozen=True, slots=True)
class ChosenExperts:
    """Each token's n experts, most likely first: `chosen` [tokens, n] i64 and `weights` [tokens, n] f32."""

    chosen: Tensor
    weights: Tensor


class LinalgExperts(Kernels):
    """Kernels of Route, GatedExperts and SumExperts for row-major float weights.

    Padding tokens are computed like other tokens.
    """

    def __init__(self, context: LoweringContext) -> None:
        super().__init__(context)
        self._experts = context.experts
        self._act = context.options.activations

    def route(self, e: Emitter, logits: Tensor, batch: Batch, scores: Tensor | None = None) -> ChosenExperts:
        values, indices = top_k(e, logits, self._experts.per_token)
        weights = self._shares(e, logits, values) if scores is None else self._scores(e, scores, indices)
        if self._experts.scale != 1:
            weights = e.elementwise("tk", ("tk", weights.shape, "f32"), [(weights, "tk")], self._scaling)
        return ChosenExperts(indices, weights)

    @property
    def _scaling(self) -> str:
        return f"""\
  %scale = arith.constant {self._experts.scale:.9e} : f32
  %y = arith.mulf %a, %scale : f32
  linalg.yield %y : f32"""

    def _scores(self, e: Emitter, scores: Tensor, indices: Tensor) -> Tensor:
        """Return the scores of the experts `indices` [tokens, n], as shares of their sum if normalised."""
        body = f"""\
  %t = linalg.index 0 : index
  %expert = arith.index_cast %a : i64 to index
  %y = tensor.extract {scores.name}[%t, %expert] : {scores.type}
  linalg.yield %y : f32"""
        kept = e.elementwise("tk", ("tk", indices.shape, "f32"), [(indices, "tk")], body)
        if not self._experts.is_normalised:
            return kept
        add = "  %y = arith.addf %a, %out : f32\n  linalg.yield %y : f32"
        shape = indices.shape[:1]
        sums = e.elementwise("tk", ("t", shape, "f32"), [(kept, "tk")], add, e.fill("0.0", shape, "f32"))
        divide = "  %y = arith.divf %a, %b : f32\n  linalg.yield %y : f32"
        return e.elementwise("tk", ("tk", kept.shape, "f32"), [(kept, "tk"), (sums, "t")], divide)

    def _shares(self, e: Emitter, logits: Tensor, values: Tensor) -> Tensor:
        """Return the softmax over the logits, or if normalised over `values`, of `values` [tokens, n]."""
        kept = values if self._experts.is_normalised else logits
        body = """\
  %below = arith.subf %a, %b : f32
  %power = math.exp %below : f32
  %sum = arith.addf %power, %out : f32
  linalg.yield %sum : f32"""
        largest, tokens = e.columns(values, 0, 1), logits.shape[0]
        zero = e.fill("0.0", (tokens,), "f32")
        sums = e.elementwise("tk", ("t", (tokens,), "f32"), [(kept, "tk"), (largest, "t0")], body, zero)
        body = """\
  %below = arith.subf %a, %b : f32
  %power = math.exp %below : f32
  %share = arith.divf %power, %c : f32
  linalg.yield %share : f32"""
        ins = [(values, "tk"), (largest, "t0"), (sums, "t")]
        return e.elementwise("tk", ("tk", values.shape, "f32"), ins, body)

    def gated_experts(
        self, e: Emitter, x: Tensor, weight: str, bias: str | None, routing: ChosenExperts
    ) -> Tensor:
        features, (tokens, per_token) = self._experts.features, routing.chosen.shape
        both = e.reshape(
            self._products(e, x, "tk", weight, bias, routing), (e.times(tokens, per_token), 2 * features)
        )
        gate, up = (e.columns(both, i * features, features) for i in range(2))
        return gated(e, gate, up, self._experts.activation, self._act)

    def sum_experts(
        self,
        e: Emitter,
        x: Tensor,
        weight: str,
        bias: str | None,
        routing: ChosenExperts,
        residual: Tensor,
    ) -> Tensor:
        tokens, per_token = routing.chosen.shape
        each = e.reshape(x, (tokens, per_token, self._experts.features))
        products = self._products(e, each, "tek", weight, bias, routing)
        body = """\
  %weighted = arith.mulf %a, %b : f32
  %sum = arith.addf %out, %weighted : f32
  linalg.yield %sum : f32"""
        ins = [(products, "ten"), (routing.weights, "te")]
        return e.elementwise("tne", ("tn", residual.shape, "f32"), ins, body, residual)

    def _products(
        self, e: Emitter, x: Tensor, access: str, weight: str, bias: str | None, routing: ChosenExperts
    ) -> Tensor:
        """Multiply each token by its experts' matrices, and add biases: [tokens, experts per token, out] f32.

        `x` is [tokens, in] or [tokens, experts per token, in]; `access` names its loops, "tk" or "tek".
        """
        w = self._weights.load_one(e, weight)
        _, out_features, _ = self._weights.shape(weight)
        widen_x, x32 = _widened("%a", x.dtype)
        widen_w, w32 = _widened("%w", w.dtype)
        body = f"""\
  %n = linalg.index 2 : index
  %k = linalg.index 3 : index
  %rows = arith.constant {out_features} : index
  %expert = arith.index_cast %b : i64 to index
  %first = arith.muli %expert, %rows : index
  %row = arith.addi %first, %n : index
  %w = tensor.extract {w.name}[%row, %k] : {w.type}
{widen_x}{widen_w}  %product = arith.mulf {x32}, {w32} : f32
  %sum = arith.addf %out, %product : f32
  linalg.yield %sum : f32"""
        shape = (*routing.chosen.shape, out_features)
        start = e.fill("0.0", shape, "f32") if bias is None else self._biases(e, bias, routing)
        ins = [(x, access), (routing.chosen, "te")]
        return e.elementwise("tenk", ("ten", shape, "f32"), ins, body, start)

    def _biases(self, e: Emitter, bias: str, routing: ChosenExperts) -> Tensor:
        """Return the biases of each token's experts, [tokens, experts per token, out] f32."""
        b = self._weights.load_one(e, bias)
        body = f"""\
  %n = linalg.index 2 : index
  %expert = arith.index_cast %a : i64 to index
  %b = tensor.extract {b.name}[%expert, %n] : {b.type}
  linalg.yield %b : f32"""
        shape = (*routing.chosen.shape, b.shape[1])
        return e.elementwise("ten", ("ten", shape, "f32"), [(routing.chosen, "te")], body)


def _widened(value: str, dtype: str) -> tuple[str, str]:
    """Return MLIR that converts the float `value` to f32, and the name of the result."""
    if dtype == "f32":
        return "", value
    return f"  {value}.f32 = arith.extf {value} : {dtype} to f32\n", f"{value}.f32"
