"""Norms and matmuls as hand-written CPU kernels."""

from __future__ import annotations

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.kernels import Render
from shortfin_apps.llm.builder.kernels.cpu.matmul import Epilogue, MatmulGeometry
from shortfin_apps.llm.builder.kernels.cpu.rms_norm import RmsNormGeometry
from shortfin_apps.llm.builder.model.spec import BuildOptions, LlamaSpec
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.layout import LANES
from shortfin_apps.llm.builder.weights.parameters import WeightTypes


class VectorOperations:
    """Kernels of Norm, Linear and GatedLinear, for panels of floats or of blocks, which are widened."""

    def __init__(
        self, spec: LlamaSpec, options: BuildOptions, target: Target, weights: WeightTypes, render: Render
    ) -> None:
        self._spec = spec
        self._options = options
        self._target = target
        self._weights = weights
        self._render = render

    def rms_norm(self, e: Emitter, x: Tensor, weight: str) -> Tensor:
        spec = self._spec
        geometry = RmsNormGeometry(spec.hidden_size, spec.rms_norm_eps, self._options.activations, self._dot2)
        kernel = self._render("cpu/rms_norm", "rms_norm", g=geometry)
        rows = x.shape[0]
        result = (x.shape, self._options.activations)
        return e.dispatch(kernel, [rows], [rows], [x, *self._weights.load(e, weight)], [result])[0]

    def linear(self, e: Emitter, x: Tensor, weight: str, residual: Tensor | None = None) -> Tensor:
        out_features = self._weights.shape(weight)[0]
        padded = -(-out_features // LANES) * LANES
        reads = [x, *self._weights.load(e, weight)] + ([residual] if residual else [])
        kernel = self._matmul(weight, "residual" if residual else "store")
        rows = x.shape[0]
        out = e.dispatch(kernel, [rows], [rows], reads, [((rows, padded), "f32")])[0]
        return e.columns(out, 0, out_features)

    def gated_linear(self, e: Emitter, x: Tensor, weight: str) -> Tensor:
        rows = x.shape[0]
        result = ((rows, self._spec.intermediate_size), self._options.activations)
        kernel = self._matmul(weight, "silu")
        return e.dispatch(kernel, [rows], [rows], [x, *self._weights.load(e, weight)], [result])[0]

    def _matmul(self, weight: str, epilogue: Epilogue) -> str:
        out_features, in_features = self._weights.shape(weight)
        bits = self._weights.layout(weight).bits
        name = f"matmul_{out_features}x{in_features}_{epilogue}" + (f"_q{bits}" if bits else "")
        geometry = MatmulGeometry(
            n=out_features,
            k_size=in_features,
            epilogue=epilogue,
            dtype=self._options.activations,
            bits=bits,
            pair=2 if self._dot2 else 1,
            has_wide_vectors=self._target.has_wide_vectors,
        )
        return self._render("cpu/matmul", name, g=geometry)

    @property
    def _dot2(self) -> bool:
        return self._options.activations == "bf16" and self._target.has_bf16_dot
