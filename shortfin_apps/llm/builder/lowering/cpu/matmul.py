"""Norms and matmuls in float vector kernels, for any CPU."""

from __future__ import annotations

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.kernels.cpu.matmul import ExpertGeometry, MatmulGeometry
from shortfin_apps.llm.builder.kernels.cpu.rms_norm import RmsNormGeometry
from shortfin_apps.llm.builder.kernels.epilogue import Epilogue
from shortfin_apps.llm.builder.lowering.dispatch import dispatch
from shortfin_apps.llm.builder.lowering.lowering import Kernels
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.parameters import WeightTypes
from shortfin_apps.llm.model.operations import Activation
from shortfin_apps.llm.model.spec import BuildOptions


class VectorOperations(Kernels):
    """Kernels of Norm, Linear and GatedLinear, for weights in floats, or in blocks dequantised on load."""

    def rms_norm(self, e: Emitter, x: Tensor, weight: str) -> Tensor:
        spec, rows = self._spec, x.shape[0]
        geometry = RmsNormGeometry(spec.hidden_size, spec.rms_norm_eps, self._options.activations, self._dot2)
        kernel = self._render("cpu/rms_norm", "rms_norm", g=geometry)
        parameter = self._weights.load_one(e, weight)
        operands = {"rows": rows, "x": x, "weight": parameter}
        return dispatch(e, kernel, geometry.interface, [rows], operands)["y"]

    def linear(self, e: Emitter, x: Tensor, weight: str, residual: Tensor | None = None) -> Tensor:
        others = {"residual": residual} if residual else {}
        out = self._multiply(e, x, weight, "residual" if residual else "store", others)
        return e.columns(out, 0, self._weights.shape(weight)[0])

    def gated_linear(self, e: Emitter, x: Tensor, weight: str, activation: Activation) -> Tensor:
        return self._multiply(e, x, weight, activation, {})

    def _multiply(
        self, e: Emitter, x: Tensor, weight: str, epilogue: Epilogue, others: dict[str, Tensor]
    ) -> Tensor:
        geometry = matmul_geometry(self._weights, weight, epilogue, self._options, self._target)
        kernel = self._render("cpu/matmul", matmul_name(geometry), g=geometry)
        rows = x.shape[0]
        parameters = dict(zip(("w", "scales"), self._weights.load(e, weight), strict=False))
        operands = {"rows": rows, "x": x, **parameters, **others}
        return dispatch(e, kernel, geometry.interface, [rows], operands)["out"]

    @property
    def _dot2(self) -> bool:
        return _has_dot2(self._options, self._target)


def matmul_geometry(
    weights: WeightTypes,
    weight: str,
    epilogue: Epilogue,
    options: BuildOptions,
    target: Target,
    experts: ExpertGeometry | None = None,
) -> MatmulGeometry:
    """Return the geometry of the matmul with `weight`; with `experts`, one matrix per expert."""
    *_, out_features, in_features = weights.shape(weight)
    return MatmulGeometry(
        n=out_features,
        k_size=in_features,
        epilogue=epilogue,
        dtype=options.activations,
        blocks=weights.layout(weight).blocks,
        pair=2 if _has_dot2(options, target) else 1,
        has_wide_vectors=target.has_wide_vectors,
        experts=experts,
    )


def matmul_name(g: MatmulGeometry) -> str:
    """Return the kernel's name."""
    return f"matmul_{g.n}x{g.k_size}_{g.epilogue}" + (f"_{g.blocks}" if g.blocks else "")


def _has_dot2(options: BuildOptions, target: Target) -> bool:
    return options.activations == "bf16" and target.has_bf16_dot
