"""Matmuls in 8-bit integers on vectors: weights are bytes, and activations are made bytes on their way in.

An activation has a scale for each token, a weight one for each output feature, and sums of products of bytes
are exact: a token's result does not depend on how many are computed together, nor on the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.kernels import Render
from shortfin_apps.llm.builder.kernels.cpu.matmul import Epilogue
from shortfin_apps.llm.builder.kernels.cpu.matmul_int8 import FEW_ROWS, MatmulInt8Geometry
from shortfin_apps.llm.builder.kernels.cpu.quantise_rows import QuantiseRowsGeometry
from shortfin_apps.llm.builder.model.spec import BuildOptions, LlamaSpec
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.layout import LANES, PANEL, TILE, num_panels, num_tiles
from shortfin_apps.llm.builder.weights.parameters import WeightTypes


@dataclass(frozen=True, slots=True)
class Input:
    """What a matmul is to quantise: `x` [tokens, features] f32 or bf16, RMS-normed with weights if so."""

    x: Tensor
    norm: Sequence[Tensor] = ()

    @property
    def suffix(self) -> str:
        """Of a kernel's name."""
        return self.x.dtype + ("_normed" if self.norm else "")


class Int8Operations:
    """Kernels of Norm, Linear and GatedLinear; a norm is computed where its readers quantise."""

    def __init__(
        self, spec: LlamaSpec, options: BuildOptions, target: Target, weights: WeightTypes, render: Render
    ) -> None:
        self._spec = spec
        self._options = options
        self._target = target
        self._weights = weights
        self._render = render

    def rms_norm(self, e: Emitter, x: Tensor, weight: str) -> Input:
        return Input(x, self._weights.load(e, weight))

    def linear(self, e: Emitter, x: Tensor | Input, weight: str, residual: Tensor | None = None) -> Tensor:
        out_features = self._weights.shape(weight)[0]
        padded = num_panels(out_features) * PANEL
        others = [residual] if residual else []
        out = self._multiply(e, x, weight, "residual" if residual else "store", others, padded, "f32")
        return e.columns(out, 0, out_features)

    def gated_linear(self, e: Emitter, x: Tensor | Input, weight: str) -> Tensor:
        features = self._spec.intermediate_size
        return self._multiply(e, x, weight, "silu", [], features, self._options.activations)

    def _multiply(
        self,
        e: Emitter,
        source: Tensor | Input,
        weight: str,
        epilogue: Epilogue,
        others: Sequence[Tensor],
        features: int,
        dtype: str,
    ) -> Tensor:
        x = source if isinstance(source, Input) else Input(source)
        rows = x.x.shape[0]
        quantises_itself = isinstance(rows, int) and rows <= FEW_ROWS
        inputs = [x.x, *x.norm] if quantises_itself else self._quantise(e, x)
        kernel = self._matmul(weight, epilogue, x if quantises_itself else None)
        reads = [*inputs, *self._weights.load(e, weight), *others]
        return e.dispatch(kernel, [rows], [rows], reads, [((rows, features), dtype)])[0]

    def _quantise(self, e: Emitter, x: Input) -> list[Tensor]:
        """x [rows, K] as tiles [rows / 16, K / 64, 16, 64] i8 and scales [rows] f32."""
        rows, size = x.x.shape
        assert isinstance(size, int)
        geometry = QuantiseRowsGeometry(size, x.x.dtype, self._spec.rms_norm_eps if x.norm else None)
        kernel = self._render("cpu/quantise_rows", f"quantise_{size}_{x.suffix}", g=geometry)
        tiles = (e.ceil_divide(rows, LANES), num_tiles(size), LANES, TILE)
        return e.dispatch(kernel, [rows], [rows], [x.x, *x.norm], [(tiles, "i8"), ((rows,), "f32")])

    def _matmul(self, weight: str, epilogue: Epilogue, x: Input | None) -> str:
        """The kernel that reads `x`, or what `_quantise` made."""
        out_features, in_features = self._weights.shape(weight)
        source = x.x.dtype if x else "tiles"
        geometry = MatmulInt8Geometry(
            n=out_features,
            k_size=in_features,
            epilogue=epilogue,
            source=source,
            eps=self._spec.rms_norm_eps if x and x.norm else None,
            has_bf16=self._target.has_bf16_dot,
        )
        name = f"matmul_{out_features}x{in_features}_{epilogue}_int8_{x.suffix if x else source}"
        return self._render("cpu/matmul_int8", name, g=geometry)
