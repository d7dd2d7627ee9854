"""Everything between two attentions in one dispatch on AMX; in a decode, with the first of them.

To start a dispatch takes as long as to read 100 kB of weights, and meanwhile memory idles. So the operations
of a layer are stages of one kernel (see kernels/amx/fused_layer.mlir.j2), which follow one another without
the runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.kernels import Render
from shortfin_apps.llm.builder.kernels.activations import TILE_ROWS
from shortfin_apps.llm.builder.kernels.amx.fused_layer import (
    FusedLayerGeometry,
    KernelGeometry,
    StageGeometry,
)
from shortfin_apps.llm.builder.kernels.amx.matmul import (
    MatmulBf16Geometry,
    MatmulBlockInt8Geometry,
    MatmulGeometry,
    MatmulInt8Geometry,
)
from shortfin_apps.llm.builder.kernels.amx.regions import Regions
from shortfin_apps.llm.builder.kernels.amx.stages import (
    QuantiseBlocksGeometry,
    QuantiseRowsGeometry,
    RmsNormGeometry,
)
from shortfin_apps.llm.builder.lowering.amx.attention import AmxAttention, kernel_name
from shortfin_apps.llm.builder.lowering.amx.stages import (
    AttendStage,
    MatmulStage,
    NormStage,
    QuantiseStage,
    Stage,
    StageList,
    buffer_row_bytes,
    inputs_of,
    operands_of,
)
from shortfin_apps.llm.builder.lowering.lowering import Values
from shortfin_apps.llm.builder.model.operations import Attend, GatedLinear, Linear, Norm, Operation
from shortfin_apps.llm.builder.model.spec import ModelSpec
from shortfin_apps.llm.builder.weights.layout import Int8Panels
from shortfin_apps.llm.builder.weights.parameters import WeightTypes


@dataclass(slots=True)
class _Calls:
    """The calls of one function of the module so far."""

    counters: Tensor
    number: int = 0


class FusedLayers:
    """Implements FusedKernels of Norm, Linear and GatedLinear; with an `attention`, of a decode's Attend.

    `operations` are the model's.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: WeightTypes,
        render: Render,
        operations: Sequence[Operation],
    ) -> None:
        self.attention: AmxAttention | None = None
        self._spec = spec
        self._weights = weights
        self._render = render
        self._calls: WeakKeyDictionary[Emitter, _Calls] = WeakKeyDictionary()
        # A run ends before an operation of another kind.
        self._most_calls = 1 + sum(not isinstance(each, Norm | Linear | GatedLinear) for each in operations)
        self._row_bytes = buffer_row_bytes(operations, spec, weights)

    def takes(self, operations: Sequence[Operation], values: Values) -> int:
        """Operations up to the next attention, beginning with one if it is that of a decode."""
        length = 0
        for operation in operations:
            if not self._is_fused(operation, values) or (length and isinstance(operation, Attend)):
                break
            length += 1
        return length

    def _is_fused(self, operation: Operation, values: Values) -> bool:
        if isinstance(operation, Attend):
            return self.attention is not None and values.batch.chunk == 1
        return isinstance(operation, Norm | Linear | GatedLinear)

    def lower(self, e: Emitter, run: Sequence[Operation], values: Values, results: Sequence[str]) -> None:
        reads = values.tensors(inputs_of(run))
        stages = StageList(run, reads.keys(), values, self._weights, self.attention, self._spec.activation)
        first = stages[0]
        prefix = kernel_name("decode_", first.geometry) if isinstance(first, AttendStage) else ""
        buffers = {stages.buffer(name): stages.features[name] for name in results}
        name = f"{prefix}fused_layer_{'_'.join(results)}{self._types_of(stages)}"
        made = self._run(e, name, stages, reads, buffers)
        for name, tensor in zip(results, made, strict=True):
            values[name] = tensor

    def _types_of(self, stages: Sequence[Stage]) -> str:
        """The end of a kernel's name: a layer's weights may have blocks of other types than another's."""
        matmuls = [stage for stage in stages if isinstance(stage, MatmulStage)]
        blocks = [self._weights.layout(stage.weight).blocks for stage in matmuls]
        return "".join(f"_{each or 'floats'}" for each in blocks) if any(blocks) else ""

    def _run(
        self,
        e: Emitter,
        name: str,
        stages: Sequence[Stage],
        reads: dict[str, Tensor],
        results: dict[str, int],
    ) -> list[Tensor]:
        """Dispatches the stages. `results`: outputs that leave the dispatch, f32, with their features."""
        first = stages[0]
        attend = first if isinstance(first, AttendStage) else None
        rows = (attend.qkv if attend else next(iter(reads.values()))).shape[0]
        if attend:
            reads = attend.reads() | reads
        stays = {name for stage in stages for name in _written_by(stage)} - results.keys()
        scratch = {name: size for name, size in self._row_bytes.items() if name in stays}
        weights = self._load(e, stages, attend)
        kernel = self._kernel(name, stages, [*reads, *weights], list(results), scratch)
        calls = self._calls_of(e)
        whole_tiles = e.times(e.ceil_divide(rows, TILE_ROWS), TILE_ROWS)
        in_place = [calls.counters, attend.batch.cache] if attend else [calls.counters]
        made = e.dispatch(
            kernel,
            [rows],
            [rows, *(attend.constants() if attend else []), calls.number],
            [*reads.values(), *weights.values()],
            [
                *in_place,
                *(((rows, features), "f32") for features in results.values()),
                ((whole_tiles, sum(scratch.values())), "i8"),
            ],
        )
        calls.counters, calls.number = made[0], calls.number + 1
        if attend:
            attend.batch.cache = made[1]
        return made[len(in_place) : -1]

    def _load(self, e: Emitter, stages: Sequence[Stage], attend: AttendStage | None) -> dict[str, Tensor]:
        """The stages' parameters by their names in the kernel."""
        sinks = self.attention.sinks(e, attend.layer) if self.attention and attend else {}
        return sinks | {
            _binding(index, nth): tensor
            for index, stage in enumerate(stages)
            if isinstance(stage, MatmulStage | NormStage)
            for nth, tensor in enumerate(self._weights.load(e, stage.weight))
        }

    def _kernel(
        self,
        name: str,
        stages: Sequence[Stage],
        reads: list[str],
        results: list[str],
        scratch: dict[str, int],
    ) -> str:
        described = tuple(
            StageGeometry(index, self._geometry(stage), _operands(index, stage))
            for index, stage in enumerate(stages)
        )
        g = FusedLayerGeometry(described, tuple(reads), tuple(results), Regions(scratch))
        return self._render("amx/fused_layer", name, g=g)

    def _calls_of(self, e: Emitter) -> _Calls:
        if e not in self._calls:
            shape = (self._most_calls, FusedLayerGeometry.call_bytes // 4)
            self._calls[e] = _Calls(e.fill("0", shape, "i32"))
        return self._calls[e]

    def _geometry(self, stage: Stage) -> KernelGeometry:
        if isinstance(stage, AttendStage):
            return stage.geometry
        if isinstance(stage, MatmulStage):
            return self._matmul_geometry(stage)
        size = self._spec.hidden_size if isinstance(stage, NormStage) else stage.size
        norm = RmsNormGeometry(size, self._spec.rms_norm_eps) if isinstance(stage, NormStage) else None
        if isinstance(stage.layout, Int8Panels):
            return QuantiseRowsGeometry(size, stage.x_tiled, norm)
        if stage.layout.blocks:
            return QuantiseBlocksGeometry(size, stage.x_tiled, norm)
        assert norm  # bf16 is not quantised
        return norm

    def _matmul_geometry(self, stage: MatmulStage) -> MatmulGeometry:
        n, k_size = self._weights.shape(stage.weight)
        layout = self._weights.layout(stage.weight)
        if isinstance(layout, Int8Panels):
            return MatmulInt8Geometry(n=n, k_size=k_size, epilogue=stage.epilogue)
        if layout.blocks:
            blocks = layout.blocks
            return MatmulBlockInt8Geometry(n=n, k_size=k_size, epilogue=stage.epilogue, blocks=blocks)
        return MatmulBf16Geometry(n=n, k_size=k_size, epilogue=stage.epilogue, is_tiled=stage.x_tiled)


def _written_by(stage: Stage) -> list[str]:
    """Names of buffers."""
    if isinstance(stage, MatmulStage) and stage.quantised:
        return [stage.out, stage.quantised]
    if isinstance(stage, NormStage | QuantiseStage) and operands_of(stage.layout) == "int8":
        return [stage.out, f"{stage.out}.scales"]
    return [stage.out]


def _binding(stage: int, parameter: int) -> str:
    """The name of a stage's weight, or, second, its scales."""
    return f"{'ws'[parameter]}{stage}"


def _operands(index: int, stage: Stage) -> dict[str, str]:
    """The buffers of stage `index` by the arguments of its function, whichever kernel that is."""
    if isinstance(stage, AttendStage):
        return {"all_out": stage.out, "sinks": "sinks" if stage.geometry.has_sinks else "all_qkv"}
    if isinstance(stage, MatmulStage):
        return {
            "x": stage.x,
            "x_scales": f"{stage.x}.scales",
            "w": _binding(index, 0),
            "w_scales": _binding(index, 1),
            "residual": stage.residual or stage.x,
            "out": stage.out,
            "quantised": stage.quantised or stage.out,
        }
    weight = _binding(index, 0) if isinstance(stage, NormStage) else stage.x
    made = {"y": stage.out, "tiles": stage.out, "x_scales": f"{stage.out}.scales"}
    return {"x": stage.x, "weight": weight, "norm": weight} | made
