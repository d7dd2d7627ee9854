"""Fused layers for CPUs: one dispatch for all operations between two attentions; in a decode, also attention.

Starting a dispatch takes as long as reading 100 kB of weights, and memory is idle meanwhile. Therefore the
operations are stages of one kernel (see kernels/fused/layer.mlir.j2), which runs the stages one after another
without returning to the runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.kernels import Render
from shortfin_apps.llm.builder.kernels.activations import TILE_ROWS
from shortfin_apps.llm.builder.kernels.fused.layer import FusedLayerGeometry, StageGeometry
from shortfin_apps.llm.builder.kernels.interface import Regions
from shortfin_apps.llm.builder.lowering.cpu.attention import sinks
from shortfin_apps.llm.builder.lowering.fused.stage_kernels import StageKernels
from shortfin_apps.llm.builder.lowering.fused.stages import (
    AttendStage,
    DecodeAttention,
    MatmulStage,
    NormStage,
    QuantiseStage,
    Stage,
    StageList,
    buffer_row_bytes,
    inputs_of,
)
from shortfin_apps.llm.builder.lowering.lowering import Values
from shortfin_apps.llm.builder.weights.layout import Int8Panels
from shortfin_apps.llm.builder.weights.parameters import WeightTypes
from shortfin_apps.llm.model.attention import Attend
from shortfin_apps.llm.model.operations import GatedLinear, Linear, Norm, Operation


@dataclass(slots=True)
class _Calls:
    """The calls of fused layers emitted so far in one function of the module.

    `counters`: memory in which each call has its own counters, to synchronise the stages; `number`: calls.
    """

    counters: Tensor
    number: int = 0


class FusedLayers:
    """FusedKernels for Norm, Linear and GatedLinear; if `attention` is set, also for Attend in a decode.

    `operations`: all operations of the model.
    """

    def __init__(
        self,
        weights: WeightTypes,
        render: Render,
        operations: Sequence[Operation],
        kernels: StageKernels,
    ) -> None:
        self.attention: DecodeAttention | None = None
        self._kernels = kernels
        self._weights = weights
        self._render = render
        self._calls: WeakKeyDictionary[Emitter, _Calls] = WeakKeyDictionary()
        self._geometries: dict[str, list[FusedLayerGeometry]] = {}  # by the kernel's name without number
        # At most one run before each operation of another kind, and one at the end.
        self._most_calls = 1 + sum(not isinstance(each, Norm | Linear | GatedLinear) for each in operations)
        self._row_bytes = buffer_row_bytes(operations, weights, kernels.kept_bytes, kernels.quant_bits)

    def takes(self, operations: Sequence[Operation], values: Values) -> int:
        """Count the leading operations that are fused.

        The run ends before the next attention. In a decode, it may start with attention, if another operation
        follows.
        """
        length = 0
        for operation in operations:
            if not self._is_fused(operation, values) or (length and isinstance(operation, Attend)):
                break
            length += 1
        return 0 if length == 1 and isinstance(operations[0], Attend) else length

    def _is_fused(self, operation: Operation, values: Values) -> bool:
        if isinstance(operation, Attend):
            attends = self.attention is not None and values.batch.chunk == 1
            return attends and not operation.only_stores
        return isinstance(operation, Norm | Linear | GatedLinear)

    def lower(self, e: Emitter, run: Sequence[Operation], values: Values, results: Sequence[str]) -> None:
        reads = values.tensors(inputs_of(run))
        stages = StageList(
            run, reads.keys(), values, self._weights, self._kernels.operands_of, self.attention
        )
        first = stages[0]
        prefix = ""
        if isinstance(first, AttendStage):
            prefix = "decode_" if first.geometry.window is None else "windowed_decode_"
        buffers = {stages.buffer(name): stages.features[name] for name in results}
        name = f"{prefix}fused_layer_{'_'.join(results)}{self._types_of(stages)}"
        made = self._run(e, name, stages, reads, buffers)
        for name, tensor in zip(results, made, strict=True):
            values[name] = tensor

    def _types_of(self, stages: Sequence[Stage]) -> str:
        """Return a suffix for the kernel's name with the block types of the weights, which differ by layer.

        It is empty if no weight is in blocks.
        """
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
        """Emit the dispatch of the stages; return its results.

        `reads`: buffer -> value of other dispatches; `results`: buffer of an f32 result -> its features.
        """
        first = stages[0]
        attend = first if isinstance(first, AttendStage) else None
        rows = (attend.qkv if attend else next(iter(reads.values()))).shape[0]
        if attend:
            reads = attend.reads() | reads
        extra_results = attend.geometry.extra_results(attend.out) if attend else {}
        stays = (
            {name for stage in stages for name in _written_by(stage)} - results.keys() - extra_results.keys()
        )
        scratch = {name: size for name, size in self._row_bytes.items() if name in stays}
        weights = self._load(e, stages, attend)
        kernel = self._kernel(name, stages, [*reads, *weights], [*results, *extra_results], scratch)
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
                *(((rows, features), dtype) for features, dtype in extra_results.values()),
                ((whole_tiles, sum(scratch.values())), "i8"),
            ],
        )
        calls.counters, calls.number = made[0], calls.number + 1
        if attend:
            attend.batch.cache = made[1]
        return made[len(in_place) :][: len(results)]

    def _load(self, e: Emitter, stages: Sequence[Stage], attend: AttendStage | None) -> dict[str, Tensor]:
        """Return the stages' weights, scales and attention sinks by their names in the kernel."""
        given = sinks(e, self._weights, attend.operation) if attend else {}
        return given | {
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
            StageGeometry(index, self._kernels.geometry(stage), _operands(index, stage, self._weights))
            for index, stage in enumerate(stages)
        )
        g = FusedLayerGeometry(
            described, tuple(reads), tuple(results), Regions(scratch), self._kernels.architecture
        )
        same_name = self._geometries.setdefault(name, [])
        if g not in same_name:  # layers may have different sizes
            same_name.append(g)
        number = same_name.index(g)
        return self._render("fused/layer", f"{name}_{number}" if number else name, g=g)

    def _calls_of(self, e: Emitter) -> _Calls:
        if e not in self._calls:
            shape = (self._most_calls, FusedLayerGeometry.call_bytes // 4)
            self._calls[e] = _Calls(e.fill("0", shape, "i32"))
        return self._calls[e]


def _written_by(stage: Stage) -> list[str]:
    """Return the names of the buffers that the stage writes."""
    if isinstance(stage, MatmulStage) and stage.quantised:
        return [stage.out, stage.quantised]
    if isinstance(stage, NormStage | QuantiseStage) and isinstance(stage.layout, Int8Panels):
        return [stage.out, f"{stage.out}.scales"]
    return [stage.out]


def _binding(stage: int, parameter: int) -> str:
    """Return the name in the kernel of parameter 0 (the weight) or 1 (its scales) of a stage."""
    return f"{'ws'[parameter]}{stage}"


def _operands(index: int, stage: Stage, weights: WeightTypes) -> dict[str, str]:
    """Return argument -> buffer for the function of stage `index`.

    Includes the arguments of all kernels that may be chosen for the stage.
    """
    if isinstance(stage, AttendStage):
        return {"all_out": stage.out, "sinks": "sinks" if stage.geometry.has_sinks else "all_qkv"}
    if isinstance(stage, MatmulStage):
        layout = weights.layout(stage.weight)
        has_scales = layout.blocks is not None or isinstance(layout, Int8Panels)
        return {
            "x": stage.x,
            "x_scales": f"{stage.x}.scales",
            "w": _binding(index, 0),
            "w_scales": _binding(index, int(has_scales)),
            "residual": stage.residual or stage.x,
            "out": stage.out,
            "quantised": stage.quantised or stage.out,
        }
    weight = _binding(index, 0) if isinstance(stage, NormStage) else stage.x
    made = {"y": stage.out, "tiles": stage.out, "x_scales": f"{stage.out}.scales"}
    return {"x": stage.x, "weight": weight, "norm": weight} | made
