"""Geometry of the fused layer: its stages, the buffers between them, and the counters that order them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from shortfin_apps.llm.builder.kernels.amx.matmul import MatmulFloatTilesGeometry, MatmulInt8Geometry
from shortfin_apps.llm.builder.kernels.avx512.attention import DecodeAttentionGeometry
from shortfin_apps.llm.builder.kernels.cpu.decode_attention import VectorDecodeGeometry
from shortfin_apps.llm.builder.kernels.fused.matmul import MatmulBlockInt8Geometry, MatmulGeometry
from shortfin_apps.llm.builder.kernels.fused.matmul_floats import MatmulFloatsGeometry
from shortfin_apps.llm.builder.kernels.fused.matmul_int8_vectors import MatmulInt8VectorsGeometry
from shortfin_apps.llm.builder.kernels.fused.stages import (
    QuantiseBlocksGeometry,
    RmsNormGeometry,
    RowQuantisationStage,
)
from shortfin_apps.llm.builder.kernels.interface import Regions

LINE_BYTES = 64
PARTITIONS = 4
LINES = 48  # counter lines per call

AttentionGeometry = DecodeAttentionGeometry | VectorDecodeGeometry
KernelGeometry = (
    AttentionGeometry | MatmulGeometry | RmsNormGeometry | QuantiseBlocksGeometry | RowQuantisationStage
)
# Templates of the stages' functions, without the suffix `_function`.
_TEMPLATES: dict[type[KernelGeometry], str] = {
    DecodeAttentionGeometry: "decode_attention",
    VectorDecodeGeometry: "decode_vectors",
    MatmulFloatTilesGeometry: "matmul_float_tiles",
    MatmulFloatsGeometry: "matmul_floats",
    MatmulInt8Geometry: "matmul_int8",
    MatmulInt8VectorsGeometry: "matmul_int8_vectors",
    MatmulBlockInt8Geometry: "matmul_block_int8",
    RmsNormGeometry: "rms_norm",
    QuantiseBlocksGeometry: "quantise_blocks",
    RowQuantisationStage: "quantise_rows",
}


@dataclass(frozen=True, slots=True)
class StageGeometry:
    """One stage; `operands` maps its function's arguments to buffers of the kernel, by name."""

    index: int
    geometry: KernelGeometry
    operands: Mapping[str, str]
    # A waiting worker prefetches its own weights and the ones it will most likely claim next.
    prefetched_panels: ClassVar[int] = 8
    prefetch_lines: ClassVar[int] = 4  # per poll

    @property
    def template(self) -> str:
        return _TEMPLATES[type(self.geometry)]

    @property
    def is_matmul(self) -> bool:
        return isinstance(self.geometry, MatmulGeometry)

    @property
    def is_attention(self) -> bool:
        return isinstance(self.geometry, AttentionGeometry)

    @property
    def prefetch_turns(self) -> int:
        """Polls needed to prefetch a matmul's weights."""
        assert isinstance(self.geometry, MatmulGeometry)
        return self.prefetched_panels * self.geometry.panel_bytes // (self.prefetch_lines * LINE_BYTES)

    @property
    def completed_at(self) -> int:
        """Offset of the counter of completed work items; the claimed items of each partition follow it."""
        return LINE_BYTES * (1 + self.index * (1 + PARTITIONS))

    @property
    def local_bytes(self) -> int:
        match self.geometry:
            case DecodeAttentionGeometry():
                return self.geometry.token_local.bytes
            case MatmulGeometry():
                return self.geometry.local.bytes
            case _:
                return 0


@dataclass(frozen=True, slots=True)
class FusedLayerGeometry:
    """A dispatch of `stages` (layer.mlir.j2).

    `reads` and `results` name bindings; `scratch` maps the buffers internal to the dispatch to their row
    bytes.
    """

    stages: tuple[StageGeometry, ...]
    reads: tuple[str, ...]
    results: tuple[str, ...]
    scratch: Regions
    architecture: str = "x86_64"
    partitions: ClassVar[int] = PARTITIONS
    many_rows: ClassVar[int] = 384  # from here on, matmuls are partitioned by rows, not columns
    min_workgroups: ClassVar[int] = 8
    max_workgroups: ClassVar[int] = 64
    rows_per_workgroup: ClassVar[int] = 8  # beyond the minimum
    call_bytes: ClassVar[int] = LINES * LINE_BYTES  # counters of one call

    def __post_init__(self) -> None:
        assert LINE_BYTES * (1 + len(self.stages) * (1 + PARTITIONS)) <= self.call_bytes

    @property
    def attention(self) -> AttentionGeometry | None:
        """The attention of the first stage, if it is a decode's."""
        first = self.stages[0].geometry
        return first if isinstance(first, AttentionGeometry) else None

    @property
    def writes(self) -> tuple[str, ...]:
        """The written bindings: in-place ones first, then results."""
        return ("counters", *(["cache"] if self.attention else []), *self.results, "scratch")

    @property
    def local_bytes(self) -> int:
        """Memory per worker, which the stages use in turn."""
        return max(LINE_BYTES, *(stage.local_bytes for stage in self.stages))
