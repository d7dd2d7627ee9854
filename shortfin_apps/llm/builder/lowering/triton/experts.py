"""Routed experts in Triton: two launches for routing, two matmuls, and the sum over a token's experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Dim, Emitter, Tensor
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext
from shortfin_apps.llm.builder.lowering.triton.expert_kernels import ExpertKernels
from shortfin_apps.llm.builder.lowering.triton.launch import Launcher
from shortfin_apps.llm.builder.lowering.triton.matmul import load_matrix
from shortfin_apps.llm.builder.lowering.triton.operands import Activations, MatmulOperands
from shortfin_apps.llm.builder.lowering.triton.tiles import MatmulTile, tiles_of
from shortfin_apps.llm.builder.weights.chosen_layout import weight_layout
from shortfin_apps.llm.model.feed_forward import MoE
from shortfin_apps.llm.model.spec import weight_shapes

_LEAST_ROWS = 16  # of a tile; two tiles of 8 would load an expert's weights twice
_LIKELY_TOKENS = 512  # the assumption if the number of tokens is unknown at compile time


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """The results of the kernels in kernels/triton/routing.py (described there) for `tokens` tokens.

    `rows`: (token, expert) pairs; `tiles`: maximum number of tiles, each with `tile_rows` rows of one expert;
    `average`: expected number of rows per expert.
    """

    tokens: Dim
    rows: Dim
    tiles: Dim
    tile_rows: int
    average: int
    weights: Tensor
    chosen: Tensor
    order: Tensor
    tile_experts: Tensor

    @property
    def operands(self) -> dict[str, Dim | Tensor]:
        """The operands that all matmuls of experts have."""
        return {
            "rows": self.rows,
            "tiles": self.tiles,
            "order": self.order,
            "tile_experts": self.tile_experts,
        }


class TritonExperts:
    """Kernels of Route, GatedExperts and SumExperts for GPUs."""

    def __init__(
        self, context: LoweringContext, experts: MoE, launcher: Launcher, operands: MatmulOperands
    ) -> None:
        self._spec = context.spec
        self._experts = experts
        self._weights = context.weights
        self._tiles = tiles_of(context.target)
        self._are_float4 = _are_float4(context)
        self._kernels = ExpertKernels(context.spec, context.options, experts)
        self._launcher = launcher
        self._operands = operands

    def route(self, e: Emitter, logits: Tensor, batch: Batch, scores: Tensor | None = None) -> ExpertTiles:
        tokens = logits.shape[0]
        rows = e.times(tokens, self._experts.per_token)
        assert batch.slots is not None
        operands = {"tokens": tokens, "rows": rows, "logits": logits, "scores": scores, "slots": batch.slots}
        made = self._launcher.launch(e, self._kernels.route(), operands)
        average = self._average(tokens)
        if own := self._own_tile(average):
            tile_rows = own.rows
        else:
            shape = 2 * self._experts.features, self._spec.hidden_size
            tile_rows = max(_LEAST_ROWS, self._tiles.matmul(average, shape).rows)
        tiles = self._most_tiles(e, rows, tile_rows)
        sizes = {"rows": rows, "tiles": tiles, "places": e.times(tiles, tile_rows)}
        kernel = self._kernels.sort(tile_rows)
        sorted_rows = self._launcher.launch(e, kernel, {**sizes, "chosen": made["chosen"]})
        return ExpertTiles(tokens, rows, tiles, tile_rows, average, **made, **sorted_rows)

    def gated_experts(
        self, e: Emitter, x: Activations, weight: str, bias: str | None, routing: ExpertTiles
    ) -> Tensor:
        kernel = self._kernels.gated(self._weights.layout(weight), self._tile_for(routing, weight))
        operands = {
            "tokens": routing.tokens,
            **self._operands.activations(e, x.x, weight),
            "in_squares": x.squares,
            **load_matrix(e, self._weights, weight),
            **self._load_bias(e, bias),
            **routing.operands,
        }
        return self._launcher.launch(e, kernel, operands)["y"]

    def sum_experts(
        self,
        e: Emitter,
        x: Tensor,
        weight: str,
        bias: str | None,
        routing: ExpertTiles,
        residual: Tensor,
        norm: Mapping[str, Tensor | None],
    ) -> dict[str, Tensor]:
        """Launch the down matmul, then `sum_experts`; return the results of the latter by name.

        `norm`: operands for the norm that follows.
        """
        kernel = self._kernels.multiply(self._weights.layout(weight), self._tile_for(routing, weight))
        matrices = load_matrix(e, self._weights, weight) | self._load_bias(e, bias)
        given = self._operands.activations(e, x, weight)
        products = self._launcher.launch(e, kernel, {**given, **matrices, **routing.operands})["y"]
        operands = {
            "tokens": routing.tokens,
            "rows": routing.rows,
            "products": products,
            "weights": routing.weights,
            "chosen": routing.chosen,
            "residual": residual,
            **norm,
        }
        return self._launcher.launch(e, self._kernels.sum(), operands)

    def _load_bias(self, e: Emitter, bias: str | None) -> dict[str, Tensor]:
        return {} if bias is None else {"bias": self._weights.load_one(e, bias)}

    def _average(self, tokens: Dim) -> int:
        """Return the expected number of rows per expert, rounded up."""
        known = tokens if isinstance(tokens, int) else _LIKELY_TOKENS
        return -(-known * self._experts.per_token // self._experts.count)

    def _own_tile(self, average: int) -> MatmulTile | None:
        return self._tiles.float4_expert(average) if self._are_float4 else None

    def _tile_for(self, routing: ExpertTiles, weight: str) -> MatmulTile:
        """Return the tile of the matmul with `weight`; its rows are the rows of the sorted tiles."""
        if own := self._own_tile(routing.average):
            return own
        _, *shape = self._weights.shape(weight)
        tile = self._tiles.matmul(routing.tile_rows, tuple(shape), self._weights.layout(weight))
        return replace(tile, rows=routing.tile_rows)

    def _most_tiles(self, e: Emitter, rows: Dim, tile_rows: int) -> Dim:
        """Return the maximum number of tiles.

        It is reached if every expert has one row, and one expert also has all remaining rows.
        """
        count = self._experts.count
        first = e.at_most(rows, count)
        if isinstance(rows, int) and isinstance(first, int):
            return first + (rows - first) // tile_rows
        others = e.value(f"arith.subi {e.index(rows)}, {e.index(first)} : index")
        whole = e.value(f"arith.divui {others}, {e.constant(tile_rows)} : index")
        return e.value(f"arith.addi {e.index(first)}, {whole} : index")


def _are_float4(context: LoweringContext) -> bool:
    """Whether the matrices of all experts are 4-bit floats."""
    spec, options = context.spec, context.options
    names = [name for name in weight_shapes(spec) if name.endswith("_exps.weight")]
    layouts = [weight_layout(name, spec, options, context.target) for name in names]
    return all(layout.blocks is not None and layout.blocks.is_e2m1 for layout in layouts)
