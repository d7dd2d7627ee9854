"""Routed experts in vector kernels for any CPU: one matmul per expert, over the expert's tokens."""

from __future__ import annotations

from dataclasses import dataclass

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Dim, Emitter, Tensor
from shortfin_apps.llm.builder.graph.token_layout import cache_slots
from shortfin_apps.llm.builder.kernels.cpu.experts import RouteGeometry, SumExpertsGeometry
from shortfin_apps.llm.builder.kernels.cpu.matmul import ExpertGeometry
from shortfin_apps.llm.builder.kernels.epilogue import Epilogue
from shortfin_apps.llm.builder.lowering.cpu.matmul import matmul_geometry, matmul_name
from shortfin_apps.llm.builder.lowering.dispatch import dispatch
from shortfin_apps.llm.builder.lowering.lowering import Kernels, LoweringContext


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """The results of the kernel route.mlir.j2 (described there) for `tokens` tokens.

    `rows`: the number of (token, expert) pairs.
    """

    tokens: Dim
    rows: Dim
    weights: Tensor
    chosen: Tensor
    order: Tensor
    ends: Tensor
    places: Tensor | None = None


class VectorExperts(Kernels):
    """Kernels of Route, GatedExperts and SumExperts, for the same weight layouts as VectorOperations."""

    sorts = False  # whether the rows of results are sorted by expert (else: by token)

    def __init__(self, context: LoweringContext) -> None:
        super().__init__(context)
        self._experts = context.experts

    def route(self, e: Emitter, logits: Tensor, batch: Batch, scores: Tensor | None = None) -> ExpertOrder:
        experts, tokens, stride = self._experts, logits.shape[0], self._options.block_seq_stride
        if batch.slots is None:
            batch.slots = cache_slots(e, batch, stride, batch.page_rows(stride))
        geometry = RouteGeometry(
            count=experts.count,
            per_token=experts.per_token,
            is_normalised=experts.is_normalised,
            stride=stride,
            has_places=self.sorts,
            has_scores=scores is not None,
            scale=experts.scale,
        )
        rows = e.times(tokens, experts.per_token)
        operands = {"tokens": tokens, "rows": rows, "logits": logits, "slots": batch.slots}
        if scores is not None:
            operands["scores"] = scores
        kernel = self._render("cpu/route", "route", g=geometry)
        return ExpertOrder(tokens, rows, **dispatch(e, kernel, geometry.interface, [tokens], operands))

    def gated_experts(
        self, e: Emitter, x: Tensor, weight: str, bias: str | None, routing: ExpertOrder
    ) -> Tensor:
        sharing = self._experts.per_token
        return self._multiply(e, x, weight, bias, self._experts.activation, sharing, routing)

    def sum_experts(
        self, e: Emitter, x: Tensor, weight: str, bias: str | None, routing: ExpertOrder, residual: Tensor
    ) -> Tensor:
        experts = self._experts
        geometry = SumExpertsGeometry(
            count=experts.count,
            per_token=experts.per_token,
            size=self._spec.hidden_size,
            is_sorted=self.sorts,
        )
        operands = {
            "tokens": routing.tokens,
            "rows": routing.rows,
            "residual": residual,
            "x": self._multiply(e, x, weight, bias, "store", 1, routing),
            "weights": routing.weights,
            "chosen": routing.chosen,
            **({} if routing.places is None else {"places": routing.places}),
        }
        kernel = self._render("cpu/sum_experts", "sum_experts", g=geometry)
        return dispatch(e, kernel, geometry.interface, [routing.tokens], operands)["out"]

    def _multiply(
        self,
        e: Emitter,
        x: Tensor,
        weight: str,
        bias: str | None,
        epilogue: Epilogue,
        sharing: int,
        routing: ExpertOrder,
    ) -> Tensor:
        """Emit the matmul of all experts, with a result row per (token, expert) pair.

        `sharing`: consecutive result rows that read the same row of x.
        """
        experts = ExpertGeometry(self._experts.count, sharing, bias is not None)
        geometry = matmul_geometry(self._weights, weight, epilogue, self._options, self._target, experts)
        kernel = self._render("cpu/matmul", f"experts_{matmul_name(geometry)}", g=geometry)
        parameters = dict(zip(("w", "scales"), self._weights.load(e, weight), strict=False))
        operands = {
            "rows": routing.rows,
            "x_rows": x.shape[0],
            "x": x,
            **parameters,
            **({} if bias is None else {"bias": self._weights.load_one(e, bias)}),
            "ends": routing.ends,
            "order": routing.order,
        }
        return dispatch(e, kernel, geometry.interface, [routing.rows], operands)["out"]
