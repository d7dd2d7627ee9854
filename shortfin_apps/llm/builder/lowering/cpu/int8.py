"""Matmuls in 8-bit integers on vectors; activations are quantised just before each matmul.

Activations have a scale per token, weights a scale per output feature. Sums of integer products are exact, so
a token's results do not depend on the batch, and are the same with AMX.
"""

from __future__ import annotations

from dataclasses import dataclass

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.kernels.cpu.int8 import QuantiseRowsGeometry
from shortfin_apps.llm.builder.kernels.cpu.matmul_int8 import FEW_ROWS, MatmulInt8Geometry
from shortfin_apps.llm.builder.kernels.epilogue import Epilogue
from shortfin_apps.llm.builder.lowering.dispatch import dispatch
from shortfin_apps.llm.builder.lowering.lowering import Kernels
from shortfin_apps.llm.builder.weights.layout import LANES
from shortfin_apps.llm.model.operations import Activation


@dataclass(frozen=True, slots=True)
class Input:
    """The input of a matmul: `x` [tokens, features] in f32 or bf16.

    If `norm` is not None, the kernel that quantises `x` first applies an RMS norm with this weight.
    """

    x: Tensor
    norm: Tensor | None = None

    @property
    def suffix(self) -> str:
        """A suffix for the names of kernels."""
        return self.x.dtype + ("_normed" if self.norm else "")

    @property
    def operands(self) -> dict[str, Tensor]:
        return {"x": self.x} | ({"norm": self.norm} if self.norm else {})


class Int8Operations(Kernels):
    """Kernels of Norm, Linear and GatedLinear; norms are fused into the quantisation of activations."""

    def rms_norm(self, e: Emitter, x: Tensor, weight: str) -> Input:
        [norm] = self._weights.load(e, weight)
        return Input(x, norm)

    def linear(self, e: Emitter, x: Tensor | Input, weight: str, residual: Tensor | None = None) -> Tensor:
        others = {"residual": residual} if residual else {}
        out = self._multiply(e, x, weight, "residual" if residual else "store", others)
        return e.columns(out, 0, self._weights.shape(weight)[0])

    def gated_linear(self, e: Emitter, x: Tensor | Input, weight: str, activation: Activation) -> Tensor:
        return self._multiply(e, x, weight, activation, {})

    def _multiply(
        self, e: Emitter, source: Tensor | Input, weight: str, epilogue: Epilogue, others: dict[str, Tensor]
    ) -> Tensor:
        x = source if isinstance(source, Input) else Input(source)
        rows = x.x.shape[0]
        quantises_itself = isinstance(rows, int) and rows <= FEW_ROWS
        inputs = x.operands if quantises_itself else self._quantise(e, x)
        geometry = self._geometry(weight, epilogue, x if quantises_itself else None)
        kind = x.suffix if quantises_itself else "tiles"
        name = f"matmul_{geometry.n}x{geometry.k_size}_{epilogue}_int8_{kind}"
        kernel = self._render("cpu/matmul_int8", name, g=geometry)
        parameters = dict(zip(("w", "w_scales"), self._weights.load(e, weight), strict=True))
        operands = {"rows": rows, **inputs, **parameters, **others}
        return dispatch(e, kernel, geometry.interface, [rows], operands)["out"]

    def _quantise(self, e: Emitter, x: Input) -> dict[str, Tensor]:
        """Emit the quantisation of x; return Int8Tiles and a scale per token, by operand name."""
        rows, size = x.x.shape
        assert isinstance(size, int)
        geometry = QuantiseRowsGeometry(
            size,
            x.x.dtype,
            self._spec.rms_norm_eps if x.norm else None,
            is_unsigned=self._target.has_block_dot and not self._target.has_neon_dot,
            has_wide_vectors=self._target.has_wide_vectors,
            has_neon=self._target.has_neon_dot,
        )
        kernel = self._render("cpu/quantise_rows", f"quantise_{size}_{x.suffix}", g=geometry)
        operands = {"rows": rows, "row_tiles": e.ceil_divide(rows, LANES), **x.operands}
        return dispatch(e, kernel, geometry.interface, [rows], operands)

    def _geometry(self, weight: str, epilogue: Epilogue, x: Input | None) -> MatmulInt8Geometry:
        """Return the geometry of a matmul that quantises `x` or, if None, reads the result of `_quantise`."""
        out_features, in_features = self._weights.shape(weight)
        return MatmulInt8Geometry(
            n=out_features,
            k_size=in_features,
            epilogue=epilogue,
            source=x.x.dtype if x else "tiles",
            eps=self._spec.rms_norm_eps if x and x.norm else None,
            has_bf16=self._target.has_bf16_dot,
            has_wide_vectors=self._target.has_wide_vectors,
            has_dot=self._target.has_block_dot,
            has_neon=self._target.has_neon_dot,
        )
