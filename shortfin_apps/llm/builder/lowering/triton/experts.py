"""Routed experts by Triton kernels: two launches that route, two matmuls, and the sum over a token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Dim, Emitter, Tensor
from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Kernel, Tiles, Tuning
from shortfin_apps.llm.builder.kernels.interface import Buffer, Interface, buffer
from shortfin_apps.llm.builder.kernels.triton import GROUP
from shortfin_apps.llm.builder.kernels.triton.experts import gated_experts, multiply_experts, sum_experts
from shortfin_apps.llm.builder.kernels.triton.routing import route, sort_by_expert
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext
from shortfin_apps.llm.builder.lowering.triton.launch import Launcher
from shortfin_apps.llm.builder.lowering.triton.matmul import (
    MATRIX,
    activations,
    block_constants,
    item_bytes,
    kind_of,
    load_matrix,
    matrix,
)
from shortfin_apps.llm.builder.lowering.triton.operands import Activations, MatmulOperands
from shortfin_apps.llm.builder.lowering.triton.tiles import MatmulTile, power_of_two, tiles_of
from shortfin_apps.llm.builder.model.experts import RoutedExperts

_LIKELY_TOKENS = 512  # of a batch whose number of tokens is not known
_COMPARED = 8192  # experts of rows that a workgroup compares at once


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """The results of routing.py for `tokens` with `rows` experts in all, in `tiles` of `tile_rows`."""

    tokens: Dim
    rows: Dim
    tiles: Dim
    tile_rows: int
    weights: Tensor
    chosen: Tensor
    order: Tensor
    tile_experts: Tensor

    @property
    def operands(self) -> dict[str, Dim | Tensor]:
        """Those of the matmuls."""
        return {
            "rows": self.rows,
            "tiles": self.tiles,
            "order": self.order,
            "tile_experts": self.tile_experts,
        }


class TritonExperts:
    """Kernels of Route, GatedExperts and SumExperts."""

    def __init__(
        self, context: LoweringContext, experts: RoutedExperts, launcher: Launcher, operands: MatmulOperands
    ) -> None:
        self._spec = context.spec
        self._experts = experts
        self._act = context.options.activations
        self._stride = context.options.block_seq_stride
        self._weights = context.weights
        self._tile_of = tiles_of(context.target).matmul
        self._launcher = launcher
        self._operands = operands

    def route(self, e: Emitter, logits: Tensor, batch: Batch) -> ExpertTiles:
        tokens = logits.shape[0]
        rows = e.times(tokens, self._experts.per_token)
        assert batch.slots is not None
        operands = {"tokens": tokens, "rows": rows, "logits": logits, "slots": batch.slots}
        made = self._launcher.launch(e, self._route_kernel(), operands)
        tile_rows = self._tile(tokens, (2 * self._experts.features, self._spec.hidden_size)).rows
        tiles = self._most_tiles(e, rows, tile_rows)
        sizes = {"rows": rows, "tiles": tiles, "places": e.times(tiles, tile_rows)}
        kernel = self._sort_kernel(tile_rows)
        sorted_rows = self._launcher.launch(e, kernel, {**sizes, "chosen": made["chosen"]})
        return ExpertTiles(tokens, rows, tiles, tile_rows, **made, **sorted_rows)

    def gated_experts(
        self, e: Emitter, x: Activations, weight: str, bias: str | None, routing: ExpertTiles
    ) -> Tensor:
        spec, experts = self._spec, self._experts
        reads = {
            **activations(self._weights.layout(weight), self._act, spec.hidden_size),
            "in_squares": buffer("f32", "tokens", spec.hidden_size // GROUP),
        }
        writes = {"y": buffer(self._act, "rows", experts.features)}
        kernel = self._matmul(gated_experts, weight, routing, reads, writes, ("tokens", "rows"))
        kernel = replace(
            kernel,
            constexprs={
                **kernel.constexprs,
                "OUT": experts.features,
                "PER_TOKEN": experts.per_token,
                "ACTIVATION": spec.activation,
            },
        )
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
        deferred: Mapping[str, Buffer],
    ) -> dict[str, Tensor]:
        """Launches `sum_experts`, and returns its results.

        `norm` are the operands of a norm behind it, `deferred` the results for that.
        """
        reads = activations(self._weights.layout(weight), self._act, self._experts.features, "rows")
        writes = {"y": buffer("f32", "rows", self._spec.hidden_size)}
        kernel = self._matmul(multiply_experts, weight, routing, reads, writes, ("rows",))
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
        return self._launcher.launch(e, self._sum_kernel(deferred), operands)

    def _load_bias(self, e: Emitter, bias: str | None) -> dict[str, Tensor]:
        return {} if bias is None else {"bias": self._weights.load_one(e, bias)}

    def _tile(self, tokens: Dim, shape: tuple[int, ...]) -> MatmulTile:
        """That of the rows which an expert has on average."""
        known = tokens if isinstance(tokens, int) else _LIKELY_TOKENS
        return self._tile_of(-(-known * self._experts.per_token // self._experts.count), shape, None)

    def _most_tiles(self, e: Emitter, rows: Dim, tile_rows: int) -> Dim:
        """The most that as many rows can fill: a row alone for each expert, and all others of one."""
        count = self._experts.count
        first = e.at_most(rows, count)
        if isinstance(rows, int) and isinstance(first, int):
            return first + (rows - first) // tile_rows
        others = e.value(f"arith.subi {e.index(rows)}, {e.index(first)} : index")
        whole = e.value(f"arith.divui {others}, {e.constant(tile_rows)} : index")
        return e.value(f"arith.addi {e.index(first)}, {whole} : index")

    def _route_kernel(self) -> Kernel:
        experts = self._experts
        kept = power_of_two(experts.per_token)
        return Kernel(
            name="route",
            function=route,
            interface=Interface(
                constants=(),
                reads={"logits": buffer("f32", "tokens", experts.count), "slots": buffer("i64", "tokens")},
                writes={"weights": buffer("f32", "rows"), "chosen": buffer("i32", "rows")},
            ),
            constexprs={
                "COUNT": experts.count,
                "BLOCK": max(kept, power_of_two(experts.count)),
                "PER_TOKEN": experts.per_token,
                "KEPT": kept,
                "IS_NORMALISED": experts.is_normalised,
                "STRIDE": self._stride,
            },
            grid=[Tiles("tokens")],
            tuning=Tuning(num_waves=1),
        )

    def _sort_kernel(self, tile_rows: int) -> Kernel:
        block = power_of_two(self._experts.count)
        return Kernel(
            name=f"sort_by_expert_{tile_rows}",
            function=sort_by_expert,
            interface=Interface(
                constants=("rows", "tiles"),
                reads={"chosen": buffer("i32", "rows")},
                writes={"order": buffer("i32", "places"), "tile_experts": buffer("i32", "tiles")},
            ),
            constexprs={
                "COUNT": self._experts.count,
                "BLOCK": block,
                "ROWS": tile_rows,
                "STEP": min(256, max(16, _COMPARED // block)),
            },
            grid=[self._experts.count],
            tuning=Tuning(num_waves=4),
        )

    def _matmul(
        self,
        function: object,
        weight: str,
        routing: ExpertTiles,
        reads: dict[str, Buffer],
        writes: dict[str, Buffer],
        constants: tuple[str, ...],
    ) -> Kernel:
        """Its grid is the tiles of rows by tiles of a matrix's rows."""
        count, *shape = self._weights.shape(weight)
        out_features, in_features = shape
        layout = self._weights.layout(weight)
        tile = self._tile_of(routing.tile_rows, (out_features, in_features), layout)
        tile = replace(tile, rows=routing.tile_rows)
        held = matrix(layout, (count * out_features, in_features))
        if self._experts.has_biases:
            held |= {"bias": buffer("f32", count, out_features)}
        tables = {"order": buffer("i32", "places"), "tile_experts": buffer("i32", "tiles")}
        name = "gated_experts" if function is gated_experts else "multiply_experts"
        return Kernel(
            name=f"{name}{kind_of(layout)}_{out_features}x{in_features}_{tile.suffix}",
            function=function,
            interface=Interface(constants, {**reads, **held, **tables}, writes),
            constexprs={
                "IN": in_features,
                "OUT": out_features,
                "COUNT": count,
                "EPS": self._spec.rms_norm_eps,
                "GROUP": GROUP,
                "BLOCKS": block_constants(layout),
                **dict.fromkeys({"x_scales", "bias", *MATRIX} - reads.keys() - held.keys()),
                **tile.constexprs(item_bytes(layout, self._act)),
            },
            grid=[Tiles("tiles"), -(-out_features // tile.columns)],
            tuning=tile.tuning,
        )

    def _sum_kernel(self, deferred: Mapping[str, Buffer]) -> Kernel:
        experts, features = self._experts, self._spec.hidden_size
        block = power_of_two(features)
        return Kernel(
            name="sum_experts",
            function=sum_experts,
            interface=Interface(
                constants=(),
                reads={
                    "products": buffer("f32", "rows", features),
                    "weights": buffer("f32", "rows"),
                    "chosen": buffer("i32", "rows"),
                    "residual": buffer("f32", "tokens", features),
                    "norm": buffer("f32", features),
                },
                writes={"y": buffer("f32", "tokens", features), **deferred},
            ),
            constexprs={
                "FEATURES": features,
                "COUNT": experts.count,
                "PER_TOKEN": experts.per_token,
                "BLOCK": block,
                "GROUP": GROUP,
            },
            grid=[Tiles("tokens")],
            tuning=Tuning(num_waves=min(8, max(1, block // 512))),
        )
