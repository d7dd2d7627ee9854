"""Everything between two attentions in one dispatch on AMX; in a decode, with the first of them.

To start a dispatch takes as long as to read 100 kB of weights, and meanwhile memory idles. So the operations
of a layer are stages of one kernel (see kernels/amx/fused_layer.mlir.j2), which follow one another without
the runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.kernels import Render
from shortfin_apps.llm.builder.lowering.amx.attention import AmxAttention
from shortfin_apps.llm.builder.lowering.amx.stages import (
    AttendStage,
    MatmulStage,
    NormStage,
    Operands,
    QuantiseStage,
    Stage,
    StageList,
    buffer_row_bytes,
    inputs_of,
    operands_of,
)
from shortfin_apps.llm.builder.lowering.lowering import Values
from shortfin_apps.llm.builder.model.operations import Attend, Operation
from shortfin_apps.llm.builder.model.spec import LlamaSpec
from shortfin_apps.llm.builder.weights.layout import PANEL, TILE, num_tiles
from shortfin_apps.llm.builder.weights.parameters import WeightTypes

_TILE_ROWS = 16
_ROWS_BYTES = 768 << 10  # rows of an item, which stay in the second-level cache beside its weights
_MOST_ROWS = 512
_ITEM_BYTES = 256 << 10  # most weights of an item: about what is lost when the last one ends late
_FEWEST_ITEMS = 48
_NORM_ROWS = 4
# Tiles or blocks along K of a panel that stay in the first-level cache.
_MAX_CHUNK: dict[Operands, int] = {"bf16": 18, "block_int8": 20, "int8": 12}
_PARTITIONS = 4
_MANY_ROWS = 384  # from which on workers share rows, not columns
_LINES = 48  # of counters of one call, 16 i32 each


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
        spec: LlamaSpec,
        weights: WeightTypes,
        render: Render,
        operations: Sequence[Operation],
    ) -> None:
        self.attention: AmxAttention | None = None
        self._spec = spec
        self._weights = weights
        self._render = render
        self._calls: WeakKeyDictionary[Emitter, _Calls] = WeakKeyDictionary()
        self._row_bytes = buffer_row_bytes(operations, spec, weights)

    def joins(self, attend: Attend, batch: Batch) -> bool:
        return self.attention is not None and batch.chunk == 1

    def lower(self, e: Emitter, run: Sequence[Operation], values: Values, results: Sequence[str]) -> None:
        reads = values.tensors(inputs_of(run))
        stages = StageList(run, reads.keys(), values, self._weights, self.attention)
        prefix = "decode_" if isinstance(run[0], Attend) else ""
        buffers = {stages.buffer(name): stages.features[name] for name in results}
        made = self._run(e, f"{prefix}fused_layer_{'_'.join(results)}", stages, reads, buffers)
        for name, tensor in zip(results, made, strict=True):
            values[name] = tensor

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
        rows = next(iter(reads.values())).shape[0]
        if attend:
            reads = attend.reads() | reads
        stays = {name for stage in stages for name in _written_by(stage)} - results.keys()
        scratch = {name: size for name, size in self._row_bytes.items() if name in stays}
        weights = self._load(e, stages)
        kernel = self._kernel(name, stages, [*reads, *weights], list(results), scratch, attend)
        calls = self._calls_of(e)
        whole_tiles = e.times(e.ceil_divide(rows, _TILE_ROWS), _TILE_ROWS)
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

    def _load(self, e: Emitter, stages: Sequence[Stage]) -> dict[str, Tensor]:
        """The stages' parameters by their names in the kernel."""
        return {
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
        attend: AttendStage | None,
    ) -> str:
        assert 1 + len(stages) * (1 + _PARTITIONS) <= _LINES
        return self._render(
            "amx/fused_layer",
            name,
            stages=[self._describe(index, stage) for index, stage in enumerate(stages)],
            attends=attend is not None,
            reads=reads,
            results=results,
            scratch=scratch,
            eps=self._spec.rms_norm_eps,
            partitions=_PARTITIONS,
            many_rows=_MANY_ROWS,
            lines=_LINES,
            **(attend.parameters if attend else {}),
        )

    def _calls_of(self, e: Emitter) -> _Calls:
        if e not in self._calls:
            most = self._spec.num_hidden_layers + 2
            self._calls[e] = _Calls(e.fill("0", (most, 16 * _LINES), "i32"))
        return self._calls[e]

    def _describe(self, index: int, stage: Stage) -> dict[str, Any]:
        """The stage as the template takes it."""
        if isinstance(stage, AttendStage):
            return {"index": index, "operation": "attention", "out": stage.out}
        common = {"index": index, "x": stage.x, "x_tiled": stage.x_tiled, "out": stage.out}
        if isinstance(stage, MatmulStage):
            return common | self._describe_matmul(index, stage)
        common |= {"operands": operands_of(stage.layout), "bits": stage.layout.bits, "row_block": _NORM_ROWS}
        if isinstance(stage, NormStage):
            size = self._spec.hidden_size
            return common | {"operation": "norm", "weight": _binding(index, 0), "size": size}
        return common | {"operation": "quantise", "weight": None, "size": stage.size}

    def _describe_matmul(self, index: int, stage: MatmulStage) -> dict[str, Any]:
        out_features, in_features = self._weights.shape(stage.weight)
        layout = self._weights.layout(stage.weight)
        operands, bits = operands_of(layout), layout.bits
        row_bytes = TILE * num_tiles(in_features) if operands == "int8" else 2 * in_features
        panel_bytes = PANEL * (in_features * bits // 8 if bits else row_bytes)
        return {
            "operation": "matmul",
            "weight": _binding(index, 0),
            "scales": None if operands == "bf16" else _binding(index, 1),
            "residual": stage.residual,
            "quantised": stage.quantised,
            "n": out_features,
            "k_size": in_features,
            "operands": operands,
            "bits": bits,
            "panel_bytes": panel_bytes,
            "max_chunk": _MAX_CHUNK[operands],
            "epilogue": stage.epilogue,
            "row_block": max(PANEL, min(_ROWS_BYTES // row_bytes // PANEL * PANEL, _MOST_ROWS)),
            "panels_per_item": _panels_per_item(out_features, panel_bytes, stage.epilogue),
        }


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


def _panels_per_item(out_features: int, panel_bytes: int, epilogue: str) -> int:
    panels = out_features // PANEL
    most = min(panels // _FEWEST_ITEMS, _ITEM_BYTES // panel_bytes)
    # Two gated panels fill a row of a tile, which two workers had better not share.
    return max(2, most // 2 * 2) if epilogue == "silu" else max(1, most)
