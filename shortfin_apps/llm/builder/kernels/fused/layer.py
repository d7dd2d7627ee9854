"""Geometry of the fused layer: its stages, the buffers between stages, and the counters that order them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from shortfin_apps.llm.builder.kernels.amx.matmul import MatmulFloatTilesGeometry, MatmulInt8Geometry
from shortfin_apps.llm.builder.kernels.avx512.attention import DecodeAttentionGeometry
from shortfin_apps.llm.builder.kernels.cpu.decode_attention import VectorDecodeGeometry
from shortfin_apps.llm.builder.kernels.fused.matmul import MatmulBlocksGeometry, MatmulGeometry
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
LINES = 48  # cache lines of counters per call

AttentionGeometry = DecodeAttentionGeometry | VectorDecodeGeometry
KernelGeometry = (
    AttentionGeometry | MatmulGeometry | RmsNormGeometry | QuantiseBlocksGeometry | RowQuantisationStage
)
# Keys of `functions` in layer.mlir.j2, which has a template for each kind of stage.
_TEMPLATES: dict[type[KernelGeometry], str] = {
    DecodeAttentionGeometry: "decode_attention",
    VectorDecodeGeometry: "decode_vectors",
    MatmulFloatTilesGeometry: "matmul_float_tiles",
    MatmulFloatsGeometry: "matmul_floats",
    MatmulInt8Geometry: "matmul_int8",
    MatmulInt8VectorsGeometry: "matmul_int8_vectors",
    MatmulBlocksGeometry: "matmul_blocks",
    RmsNormGeometry: "rms_norm",
    QuantiseBlocksGeometry: "quantise_blocks",
    RowQuantisationStage: "quantise_rows",
}


@dataclass(frozen=True, slots=True)
class StageGeometry:
    """One stage of the fused layer.

    `operands` maps the arguments of the stage's function to buffers of the kernel, both by name.
    """

    index: int
    geometry: KernelGeometry
    operands: Mapping[str, str]
    # A waiting worker prefetches weights of the work item that it has claimed, and of the items that it
    # will most likely claim next.
    prefetched_panels: ClassVar[int] = 8
    prefetch_lines: ClassVar[int] = 4  # cache lines per poll of the counter

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
        """Number of polls of the counter in which a waiting worker prefetches a matmul's weights."""
        assert isinstance(self.geometry, MatmulGeometry)
        return self.prefetched_panels * self.geometry.panel_bytes // (self.prefetch_lines * LINE_BYTES)

    @property
    def completed_at(self) -> int:
        """Byte offset of the stage's counter of completed work items.

        The counters of claimed work items, one per partition, follow.
        """
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

    `reads` and `results`: names of bindings. `scratch`: the bytes per row of each buffer that only the
    dispatch uses.
    """

    stages: tuple[StageGeometry, ...]
    reads: tuple[str, ...]
    results: tuple[str, ...]
    scratch: Regions
    architecture: str = "x86_64"
    partitions: ClassVar[int] = PARTITIONS
    many_rows: ClassVar[int] = 384  # with as many or more, partitions are of rows instead of columns
    min_workgroups: ClassVar[int] = 8
    max_workgroups: ClassVar[int] = 64
    rows_per_workgroup: ClassVar[int] = 8  # so many rows add one workgroup to the minimum
    call_bytes: ClassVar[int] = LINES * LINE_BYTES  # counters of one call

    def __post_init__(self) -> None:
        assert LINE_BYTES * (1 + len(self.stages) * (1 + PARTITIONS)) <= self.call_bytes

    @property
    def attention(self) -> AttentionGeometry | None:
        """The attention of the first stage; None if the first stage is none (only decodes have one)."""
        first = self.stages[0].geometry
        return first if isinstance(first, AttentionGeometry) else None

    @property
    def writes(self) -> tuple[str, ...]:
        """The written bindings: counters and any cache, which are updated in place; results; scratch."""
        return ("counters", *(["cache"] if self.attention else []), *self.results, "scratch")

    @property
    def local_bytes(self) -> int:
        """Bytes of memory per worker, which the stages use one after another."""
        return max(LINE_BYTES, *(stage.local_bytes for stage in self.stages))
