"""Create the kernels of routed experts: routing, the two matmuls, and the sum over a token's experts."""

from __future__ import annotations

from collections.abc import Mapping

from shortfin_apps.llm.builder.kernels.ahead_of_time.kernel import Constexpr, Kernel, Tiles, Tuning
from shortfin_apps.llm.builder.kernels.interface import Buffer, Interface, buffer
from shortfin_apps.llm.builder.kernels.triton import GROUP
from shortfin_apps.llm.builder.kernels.triton.experts import gated_experts, multiply_experts, sum_experts
from shortfin_apps.llm.builder.kernels.triton.routing import route, sort_by_expert
from shortfin_apps.llm.builder.lowering.triton.matmul import (
    MATRIX,
    activations,
    block_constants,
    deferred,
    item_bytes,
    kind_of,
    matrix,
)
from shortfin_apps.llm.builder.lowering.triton.tiles import MatmulTile, power_of_two
from shortfin_apps.llm.builder.weights.layout import WeightLayout
from shortfin_apps.llm.model.feed_forward import MoE
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec

_COMPARED = 8192  # comparisons of a workgroup at once: (token, expert) pairs times experts


class ExpertKernels:
    """Creates the kernels for the routed `experts` of `spec`; kernels/triton/ describes their operands."""

    def __init__(self, spec: ModelSpec, options: BuildOptions, experts: MoE) -> None:
        self._spec = spec
        self._experts = experts
        self._act = options.activations
        self._stride = options.block_seq_stride

    def route(self) -> Kernel:
        experts = self._experts
        kept = power_of_two(experts.per_token)
        return Kernel(
            name="route",
            function=route,
            interface=Interface(
                constants=(),
                reads={
                    **{name: buffer("f32", "tokens", experts.count) for name in ("logits", "scores")},
                    "slots": buffer("i64", "tokens"),
                },
                writes={"weights": buffer("f32", "rows"), "chosen": buffer("i32", "rows")},
            ),
            constexprs={
                "COUNT": experts.count,
                "BLOCK": max(kept, power_of_two(experts.count)),
                "PER_TOKEN": experts.per_token,
                "KEPT": kept,
                "IS_NORMALISED": experts.is_normalised,
                "SCALE": experts.scale,
                "STRIDE": self._stride,
            },
            grid=[Tiles("tokens")],
            tuning=Tuning(num_waves=1),
        )

    def sort(self, tile_rows: int) -> Kernel:
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

    def gated(self, layout: WeightLayout, tile: MatmulTile) -> Kernel:
        """Return the matmul with the gate and up matrices, and the activation.

        The (token, expert) pairs must be sorted by expert in tiles of `tile.rows`.
        """
        spec, experts = self._spec, self._experts
        interface = Interface(
            constants=("tokens", "rows"),
            reads={
                **activations(layout, self._act, spec.hidden_size),
                "in_squares": buffer("f32", "tokens", spec.hidden_size // GROUP),
                **self._matrices(layout, 2 * experts.features, spec.hidden_size),
            },
            writes={"y": buffer(self._act, "rows", experts.features)},
        )
        constexprs = {
            "OUT": experts.features,
            "PER_TOKEN": experts.per_token,
            "ACTIVATION": self._experts.activation,
        }
        shape = 2 * experts.features, spec.hidden_size
        return self._matmul("gated_experts", gated_experts, interface, shape, layout, tile, constexprs)

    def multiply(self, layout: WeightLayout, tile: MatmulTile) -> Kernel:
        """Return the matmul of the gated results with the experts' down matrices."""
        shape = self._spec.hidden_size, self._experts.features
        interface = Interface(
            constants=("rows",),
            reads={
                **activations(layout, self._act, self._experts.features, "rows"),
                **self._matrices(layout, *shape),
            },
            writes={"y": buffer("f32", "rows", self._spec.hidden_size)},
        )
        constexprs = {"OUT": self._spec.hidden_size}
        return self._matmul("multiply_experts", multiply_experts, interface, shape, layout, tile, constexprs)

    def sum(self) -> Kernel:
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
                writes={"y": buffer("f32", "tokens", features), **deferred(self._act, features)},
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

    def _matrices(self, layout: WeightLayout, out_features: int, in_features: int) -> dict[str, Buffer]:
        """Return the buffers of all experts' weights and biases, and of the order of rows by expert."""
        count = self._experts.count
        held = matrix(layout, (count * out_features, in_features))
        if self._experts.biases:
            held["bias"] = buffer("f32", count, out_features)
        return {**held, "order": buffer("i32", "places"), "tile_experts": buffer("i32", "tiles")}

    def _matmul(
        self,
        name: str,
        function: object,
        interface: Interface,
        shape: tuple[int, int],
        layout: WeightLayout,
        tile: MatmulTile,
        constexprs: Mapping[str, Constexpr],
    ) -> Kernel:
        """Return a matmul with a grid of row tiles by tiles of output features; `shape`: of one matrix."""
        out_features, in_features = shape
        return Kernel(
            name=f"{name}{kind_of(layout)}_{out_features}x{in_features}_{tile.suffix}",
            function=function,
            interface=interface,
            constexprs={
                "IN": in_features,
                "COUNT": self._experts.count,
                "EPS": self._spec.rms_norm_eps,
                "GROUP": GROUP,
                "BLOCKS": block_constants(layout),
                **dict.fromkeys({"x_scales", "bias", *MATRIX} - interface.reads.keys()),
                **constexprs,
                **tile.constexprs(item_bytes(layout, self._act)),
            },
            grid=[Tiles("tiles"), -(-out_features // tile.columns)],
            tuning=tile.tuning,
        )
