"""Matmuls of weights in blocks as integers on vectors; activations are quantised in blocks before each.

Products within a block are exact, so results have the bits of AMX's, whose layout of weights and
activations this is. A weight in floats is multiplied as on any CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.kernels import Render
from shortfin_apps.llm.builder.kernels.cpu.matmul_block_int8 import VectorBlockInt8Geometry
from shortfin_apps.llm.builder.kernels.cpu.quantise_blocks import QuantiseDispatchGeometry
from shortfin_apps.llm.builder.kernels.epilogue import Epilogue
from shortfin_apps.llm.builder.lowering.cpu.matmul import VectorOperations
from shortfin_apps.llm.builder.lowering.dispatch import dispatch
from shortfin_apps.llm.builder.model.spec import BuildOptions, ModelSpec
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.layout import LANES
from shortfin_apps.llm.builder.weights.parameters import WeightTypes


@dataclass(slots=True)
class Input:
    """Activations [tokens, features] bf16, or f32 to be RMS-normed by the weight `norm`.

    `blocks` are the same quantised, once something has made them.
    """

    x: Tensor
    norm: str | None = None
    blocks: Tensor | None = None


class BlockInt8Operations:
    """Kernels of Norm, Linear and GatedLinear; a norm is deferred to the quantisation of what reads it."""

    def __init__(
        self, spec: ModelSpec, options: BuildOptions, target: Target, weights: WeightTypes, render: Render
    ) -> None:
        self._spec = spec
        self._target = target
        self._weights = weights
        self._render = render
        self._floats = VectorOperations(spec, options, target, weights, render)

    def rms_norm(self, e: Emitter, x: Tensor, weight: str) -> Input:
        return Input(x, weight)

    def linear(self, e: Emitter, x: Tensor | Input, weight: str, residual: Tensor | None = None) -> Tensor:
        if self._weights.layout(weight).blocks is None:
            return self._floats.linear(e, self._as_floats(e, x), weight, residual)
        others = {"residual": residual} if residual else {}
        return self._multiply(e, x, weight, "residual" if residual else "store", others)["out"]

    def gated_linear(self, e: Emitter, x: Tensor | Input, weight: str) -> Input:
        if self._weights.layout(weight).blocks is None:
            return Input(self._floats.gated_linear(e, self._as_floats(e, x), weight))
        results = self._multiply(e, x, weight, self._spec.activation, {})
        return Input(results["out"], blocks=results["quantised"])

    def _multiply(
        self, e: Emitter, x: Tensor | Input, weight: str, epilogue: Epilogue, others: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        blocks = self._quantised(e, x if isinstance(x, Input) else Input(x))
        rows = (x.x if isinstance(x, Input) else x).shape[0]
        geometry = self._geometry(weight, epilogue)
        name = f"matmul_{geometry.n}x{geometry.k_size}_{epilogue}_int8_{geometry.blocks}"
        kernel = self._render("cpu/matmul_block_int8", name, g=geometry)
        parameters = dict(zip(("w", "w_scales"), self._weights.load(e, weight), strict=True))
        operands = {"rows": rows, "row_tiles": blocks.shape[0], "x": blocks, **parameters, **others}
        return dispatch(e, kernel, geometry.interface, [rows], operands)

    def _quantised(self, e: Emitter, x: Input) -> Tensor:
        if x.blocks is None:
            rows, size = x.x.shape
            assert isinstance(size, int)
            eps = self._spec.rms_norm_eps if x.norm else None
            geometry = QuantiseDispatchGeometry(size, eps, self._target.has_wide_vectors)
            kernel = self._render(
                "cpu/quantise_blocks", f"quantise_blocks_{size}{'_normed' * bool(x.norm)}", g=geometry
            )
            norm = {"norm": self._weights.load_one(e, x.norm)} if x.norm else {}
            operands = {"rows": rows, "row_tiles": e.ceil_divide(rows, LANES), "x": x.x, **norm}
            x.blocks = dispatch(e, kernel, geometry.interface, [rows], operands)["blocks"]
        return x.blocks

    def _as_floats(self, e: Emitter, x: Tensor | Input) -> Tensor:
        if isinstance(x, Tensor):
            return x
        return x.x if x.norm is None else self._floats.rms_norm(e, x.x, x.norm)

    def _geometry(self, weight: str, epilogue: Epilogue) -> VectorBlockInt8Geometry:
        out_features, in_features = self._weights.shape(weight)
        blocks = self._weights.layout(weight).blocks
        assert blocks is not None
        return VectorBlockInt8Geometry(
            n=out_features,
            k_size=in_features,
            epilogue=epilogue,
            blocks=blocks,
            has_bf16=self._target.has_bf16_dot,
            has_wide_vectors=self._target.has_wide_vectors,
            has_dot=self._target.has_block_dot,
        )
