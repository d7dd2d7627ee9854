"""Choose the kernel of each stage of a fused layer, by target and weight layout."""

from __future__ import annotations

from dataclasses import dataclass

from shortfin_apps.llm.builder.kernels.amx.matmul import MatmulFloatTilesGeometry, MatmulInt8Geometry
from shortfin_apps.llm.builder.kernels.fused.layer import KernelGeometry
from shortfin_apps.llm.builder.kernels.fused.matmul import MatmulBlocksGeometry, MatmulGeometry
from shortfin_apps.llm.builder.kernels.fused.matmul_floats import MatmulFloatsGeometry
from shortfin_apps.llm.builder.kernels.fused.matmul_int8_vectors import MatmulInt8VectorsGeometry
from shortfin_apps.llm.builder.kernels.fused.stages import (
    QuantiseBlocksGeometry,
    RmsNormGeometry,
    RowQuantisationStage,
)
from shortfin_apps.llm.builder.lowering.fused.stages import (
    AttendStage,
    MatmulStage,
    NormStage,
    Operands,
    QuantiseStage,
    Stage,
)
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.chosen_layout import fills_tiles
from shortfin_apps.llm.builder.weights.layout import FLOAT_DTYPES, Int8Panels, QuantisedPanels, WeightLayout
from shortfin_apps.llm.builder.weights.parameters import WeightTypes
from shortfin_apps.llm.model.spec import ActivationBits, FloatType, ModelSpec, QuantBits


@dataclass(frozen=True, slots=True)
class StageKernels:
    """Chooses kernels for the stages of the model's layers.

    `activations`: the dtype of float activations; `block_bits`: bits of activations for weights in blocks.
    """

    spec: ModelSpec
    weights: WeightTypes
    activations: FloatType
    block_bits: ActivationBits
    target: Target

    @property
    def has_tiles(self) -> bool:
        """Whether matmuls use AMX tiles, and stages store activations as such tiles."""
        return fills_tiles(self.spec, self.activations, self.target)

    @property
    def widens_blocks(self) -> bool:
        """Whether weights in blocks become bf16 before they are multiplied, in AMX tiles."""
        return self.block_bits == 16

    @property
    def quant_bits(self) -> QuantBits:
        """Bits of activations that are multiplied as integers; 12 if there are none."""
        return 8 if self.block_bits == 8 else 12

    def operands_of(self, layout: WeightLayout) -> Operands:
        """Return the form of the input of matmuls with weights in this layout."""
        if isinstance(layout, Int8Panels):
            return "int8"
        return "blocks" if layout.blocks and not self.widens_blocks else "floats"

    @property
    def _vectors(self) -> dict[str, bool]:
        """The arguments of integer kernels for the target's vectors."""
        return {"has_wide_vectors": self.target.has_wide_vectors, "has_neon": self.target.has_neon_dot}

    @property
    def _is_shifted(self) -> bool:
        """Whether int8 activations are stored as bytes with an offset of 128."""
        return not self.has_tiles and self.target.has_block_dot and not self.target.has_neon_dot

    @property
    def architecture(self) -> str:
        return self.target.architecture

    @property
    def _has_pairs(self) -> bool:
        """Whether matmuls use dot products of bf16 pairs."""
        has_dot = self.target.has_bf16_dot or self.target.has_neon_bf16_dot
        return self.activations == "bf16" and has_dot

    @property
    def kept(self) -> FloatType:
        """The dtype of float activations between stages.

        Without AMX tiles or bf16 dot products this is f32, as the kernels then convert x to f32 anyway.
        """
        return self.activations if self.has_tiles or self._has_pairs else "f32"

    @property
    def kept_bytes(self) -> int:
        return FLOAT_DTYPES[self.kept].itemsize

    def geometry(self, stage: Stage) -> KernelGeometry:
        match stage:
            case AttendStage():
                return stage.geometry
            case MatmulStage():
                return self._matmul(stage)
            case NormStage():
                return self._rows(stage, self.spec.hidden_size, self._norm)
            case QuantiseStage():
                return self._rows(stage, stage.size, None)

    @property
    def _norm(self) -> RmsNormGeometry:
        eps, has_bf16 = self.spec.rms_norm_eps, self.target.has_bf16_dot
        return RmsNormGeometry(self.spec.hidden_size, eps, self.has_tiles, self.kept, has_bf16)

    def _rows(
        self, stage: NormStage | QuantiseStage, size: int, norm: RmsNormGeometry | None
    ) -> KernelGeometry:
        is_tiled = stage.x_kept and self.has_tiles
        if isinstance(stage.layout, Int8Panels):
            dtype, eps = ("f32", norm.eps) if norm else ("bf16", None)
            return RowQuantisationStage(size, dtype, eps, is_tiled, self._is_shifted, **self._vectors)
        if self.operands_of(stage.layout) == "blocks":
            dtype = self.kept if stage.x_kept else self.activations
            return QuantiseBlocksGeometry(size, self.quant_bits, is_tiled, norm, dtype=dtype, **self._vectors)
        assert norm  # floats are not quantised
        return norm

    def _matmul(self, stage: MatmulStage) -> MatmulGeometry:
        layout = self.weights.layout(stage.weight)
        if isinstance(layout, Int8Panels):
            return self._in_bytes(stage, layout)
        if isinstance(layout, QuantisedPanels) and not self.widens_blocks:
            return self._in_blocks(stage, layout)
        return self._in_tiles(stage, layout) if self.has_tiles else self._in_floats(stage)

    def _in_bytes(self, stage: MatmulStage, layout: Int8Panels) -> MatmulGeometry:
        n, k_size = self.weights.shape(stage.weight)
        if self.has_tiles:
            return MatmulInt8Geometry(n=n, k_size=k_size, epilogue=stage.epilogue)
        return MatmulInt8VectorsGeometry(
            n=n,
            k_size=k_size,
            epilogue=stage.epilogue,
            pair=layout.pair,
            has_bf16=self.target.has_bf16_dot,
            has_dot=self.target.has_block_dot,
            **self._vectors,
        )

    def _in_blocks(self, stage: MatmulStage, layout: QuantisedPanels) -> MatmulGeometry:
        n, k_size = self.weights.shape(stage.weight)
        return MatmulBlocksGeometry(
            n=n,
            k_size=k_size,
            epilogue=stage.epilogue,
            blocks=layout.blocks,
            x_bits=self.quant_bits,
            pair=layout.pair,
            has_tiles=self.has_tiles,
            has_bf16=self.target.has_bf16_dot,
            has_dot=self.target.has_block_dot,
            **self._vectors,
        )

    def _in_tiles(self, stage: MatmulStage, layout: WeightLayout) -> MatmulGeometry:
        n, k_size = self.weights.shape(stage.weight)
        return MatmulFloatTilesGeometry(
            n=n,
            k_size=k_size,
            epilogue=stage.epilogue,
            dtype=self.activations,
            is_tiled=stage.x_kept,
            blocks=layout.blocks,
        )

    def _in_floats(self, stage: MatmulStage) -> MatmulGeometry:
        n, k_size = self.weights.shape(stage.weight)
        return MatmulFloatsGeometry(
            n=n,
            k_size=k_size,
            epilogue=stage.epilogue,
            dtype=self.activations,
            x_dtype=self.kept if stage.x_kept else self.activations,
            gated_dtype=self.kept,
            pair=2 if self._has_pairs else 1,
            has_bf16=self.target.has_bf16_dot,
            has_wide_vectors=self.target.has_wide_vectors,
            has_neon=self.target.has_neon_bf16_dot,
        )
