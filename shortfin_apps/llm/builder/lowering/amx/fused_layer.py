"""What lies between two attentions, in a decode with the first of them, in one dispatch, on the matrix unit.

To start a dispatch takes as long as to read 100 kB of weights, and meanwhile memory idles. So the operations
of a layer are stages of one kernel (see kernels/amx/fused_layer.mlir.j2), which follow one another without
the runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Dim, Emitter, Tensor
from shortfin_apps.llm.builder.kernels import Render
from shortfin_apps.llm.builder.model.spec import BuildOptions, LlamaSpec
from shortfin_apps.llm.builder.quantise import BLOCK
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.layout import (
    PANEL,
    TILE,
    Int8Panels,
    WeightLayout,
    fills_tiles,
    num_tiles,
)
from shortfin_apps.llm.builder.weights.parameters import WeightTypes

# What matmuls multiply: bf16, blocks of integers, or bytes with a scale for each row.
Operands = Literal["bf16", "block_int8", "int8"]

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
_ATTENDED = "attended"  # the buffer whose rows lie apart; others within a dispatch are in tiles
_LINES = 48  # of counters of one call, 16 i32 each


@dataclass(frozen=True, slots=True)
class Matmul:
    """A stage: `x` times `weight`, to `out`, by epilogue plus `residual`, or as silu(gate) * up.

    Buffers go by name; `x` holds what the weight's layout takes. One in blocks gates to `quantised` as well.
    """

    weight: str
    x: str
    out: str
    epilogue: Literal["store", "residual", "silu"] = "store"
    residual: str | None = None
    quantised: str | None = None


@dataclass(frozen=True, slots=True)
class Attend:
    """A stage, which can only be the first: a decode's attention, to `out` [rows, heads * head_dim] bf16.

    `parameters` are its kernel's. It writes to the batch's cache.
    """

    out: str
    qkv: Tensor
    layer: int
    batch: Batch
    parameters: Mapping[str, Any]

    def constants(self) -> list[Dim]:
        return [self.batch.width, self.batch.pages, self.layer]

    def reads(self) -> dict[str, Tensor]:
        batch = self.batch
        return {
            "all_qkv": self.qkv,
            "all_rotary": batch.rotary,
            "starts": batch.starts,
            "seq_lens": batch.seq_lens,
            "blocks": batch.blocks,
        }


@dataclass(frozen=True, slots=True)
class Norm:
    """A stage: RMS norm of `x` by `weight`, to `out`, as operand of weights of that layout."""

    weight: str
    x: str
    out: str
    layout: WeightLayout


@dataclass(frozen=True, slots=True)
class Quantise:
    """A stage: `x` [rows, size] bf16 to `out`, as operand of weights of that layout."""

    x: str
    out: str
    layout: WeightLayout
    size: int


Stage = Attend | Matmul | Norm | Quantise


@dataclass(slots=True)
class _Calls:
    """The calls of one function of the module so far."""

    counters: Tensor
    number: int = 0


def takes_fused_layers(spec: LlamaSpec, options: BuildOptions, target: Target) -> bool:
    """Whether the CPU has the matrix unit and the model fills its tiles."""
    return fills_tiles(spec, target) and options.activations == "bf16"


class FusedLayers:
    """Implements CpuOperations."""

    def __init__(self, spec: LlamaSpec, weights: WeightTypes, render: Render) -> None:
        self._spec = spec
        self._weights = weights
        self._render = render
        self._calls: WeakKeyDictionary[Emitter, _Calls] = WeakKeyDictionary()
        # Of what may stay within a dispatch.
        self._row_bytes = {"sum": 4 * spec.hidden_size}
        heads = spec.num_attention_heads * spec.head_dim
        for name, size in (
            ("normed", spec.hidden_size),
            (_ATTENDED, heads),
            ("gated", spec.intermediate_size),
        ):
            self._row_bytes |= _operand_bytes(name, size)

    def project(self, e: Emitter, x: Tensor) -> Tensor:
        results = {"qkv": self._spec.qkv_features}
        return self._run(e, "project", self._projection(0, "x"), {"x": x}, results)[0]

    def advance(self, e: Emitter, x: Tensor, attended: Tensor, layer: int) -> tuple[Tensor, Tensor | None]:
        return self._layer(e, layer, "", [], {"x": x, _ATTENDED: attended})

    def decode(
        self, e: Emitter, x: Tensor, qkv: Tensor, layer: int, batch: Batch, parameters: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """`advance` of rows of one token each, with the attention before it. `parameters`: its kernel's."""
        attend = Attend(_ATTENDED, qkv, layer, batch, parameters)
        return self._layer(e, layer, "decode_", [attend], {"x": x})

    def _layer(
        self, e: Emitter, layer: int, prefix: str, before: Sequence[Stage], reads: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        block = f"blk.{layer}."
        gate_up = Matmul(f"{block}ffn_gate_up.weight", "normed", "gated", "silu")
        down = Matmul(f"{block}ffn_down.weight", gate_up.out, "y", "residual", "sum")
        feed_down = self._multiply_rows(down)
        if self._operands(gate_up) == "block_int8":
            gate_up = replace(gate_up, quantised="gated_block_int8")
            feed_down = [replace(down, x="gated_block_int8")]
        stages: list[Stage] = [
            *before,
            *self._multiply_rows(Matmul(f"{block}attn_output.weight", _ATTENDED, "sum", "residual", "x")),
            *self._multiply_normed(f"{block}ffn_norm.weight", "sum", gate_up),
            *feed_down,
        ]
        hidden = self._spec.hidden_size
        if layer + 1 == self._spec.num_hidden_layers:
            return self._run(e, f"{prefix}finish", stages, reads, {"y": hidden})[0], None
        stages += self._projection(layer + 1, "y")
        results = {"y": hidden, "qkv": self._spec.qkv_features}
        x, qkv = self._run(e, f"{prefix}advance", stages, reads, results)
        return x, qkv

    def logits(self, e: Emitter, x: Tensor) -> Tensor:
        head = Matmul(self._spec.head_weight, "normed", "logits")
        stages = self._multiply_normed("output_norm.weight", "x", head)
        return self._run(e, "logits", stages, {"x": x}, {"logits": self._spec.vocab_size})[0]

    def _projection(self, layer: int, x: str) -> list[Stage]:
        matmul = Matmul(f"blk.{layer}.attn_qkv.weight", "normed", "qkv")
        return self._multiply_normed(f"blk.{layer}.attn_norm.weight", x, matmul)

    def _multiply_rows(self, matmul: Matmul) -> list[Stage]:
        """The matmul of what another stage left in bf16."""
        operands = self._operands(matmul)
        if operands == "bf16":
            return [matmul]
        layout, size = self._weights.layout(matmul.weight), self._weights.shape(matmul.weight)[1]
        quantise = Quantise(matmul.x, f"{matmul.x}_{operands}", layout, size)
        return [quantise, replace(matmul, x=quantise.out)]

    def _multiply_normed(self, norm: str, x: str, matmul: Matmul) -> list[Stage]:
        """The matmul of the norm of `x`."""
        operands = self._operands(matmul)
        normed = matmul.x if operands == "bf16" else f"{matmul.x}_{operands}"
        return [Norm(norm, x, normed, self._weights.layout(matmul.weight)), replace(matmul, x=normed)]

    def _operands(self, matmul: Matmul) -> Operands:
        return _operands_of(self._weights.layout(matmul.weight))

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
        attend = first if isinstance(first, Attend) else None
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
            if isinstance(stage, Matmul | Norm)
            for nth, tensor in enumerate(self._weights.load(e, stage.weight))
        }

    def _kernel(
        self,
        name: str,
        stages: Sequence[Stage],
        reads: list[str],
        results: list[str],
        scratch: dict[str, int],
        attend: Attend | None,
    ) -> str:
        assert 1 + len(stages) * (1 + _PARTITIONS) <= _LINES
        return self._render(
            "amx/fused_layer",
            name,
            stages=[self._describe(index, stage, scratch) for index, stage in enumerate(stages)],
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

    def _describe(self, index: int, stage: Stage, scratch: dict[str, int]) -> dict[str, Any]:
        """The stage as the template takes it."""
        if isinstance(stage, Attend):
            return {"index": index, "operation": "attention", "out": stage.out}
        x_tiled = stage.x in scratch and stage.x not in ("sum", _ATTENDED)
        common = {"index": index, "x": stage.x, "x_tiled": x_tiled, "out": stage.out}
        if isinstance(stage, Matmul):
            return common | self._describe_matmul(index, stage)
        common |= {"operands": _operands_of(stage.layout), "bits": stage.layout.bits, "row_block": _NORM_ROWS}
        if isinstance(stage, Norm):
            size = self._spec.hidden_size
            return common | {"operation": "norm", "weight": _binding(index, 0), "size": size}
        return common | {"operation": "quantise", "weight": None, "size": stage.size}

    def _describe_matmul(self, index: int, stage: Matmul) -> dict[str, Any]:
        out_features, in_features = self._weights.shape(stage.weight)
        operands, bits = self._operands(stage), self._weights.layout(stage.weight).bits
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


def _operands_of(layout: WeightLayout) -> Operands:
    if isinstance(layout, Int8Panels):
        return "int8"
    return "block_int8" if layout.bits else "bf16"


def _operand_bytes(name: str, features: int) -> dict[str, int]:
    """Of a row of the buffer `name`, and of what it is quantised to (kernels/quantise_*_function.mlir.j2)."""
    return {
        name: 2 * features,
        f"{name}_block_int8": features // BLOCK * 40,
        f"{name}_int8": TILE * num_tiles(features),
        f"{name}_int8.scales": 4,
    }


def _written_by(stage: Stage) -> list[str]:
    """Names of buffers."""
    if isinstance(stage, Matmul) and stage.quantised:
        return [stage.out, stage.quantised]
    if isinstance(stage, Norm | Quantise) and _operands_of(stage.layout) == "int8":
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
