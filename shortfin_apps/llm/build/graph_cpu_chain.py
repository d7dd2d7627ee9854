"""All that lies between two attentions in one dispatch, on the matrix unit.

To start a dispatch takes as long as to read 100 kB of weights, and meanwhile memory idles. So the operations
of a layer are phases of one kernel (see kernels/chain_amx.mlir.j2), which follow one another without the
runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

from shortfin_apps.llm.build.graph_target import Target
from shortfin_apps.llm.build.graph_text import Emitter, Tensor
from shortfin_apps.llm.build.graph_weights import WeightTypes
from shortfin_apps.llm.build.kernels import Render
from shortfin_apps.llm.build.spec import BuildOptions, LlamaSpec

_TILE_ROWS = 16
_TILE = 32  # bf16 of one row of a tile, and columns of two
_ROWS_BYTES = 768 << 10  # rows of an item, which stay in the second-level cache beside its weights
_MOST_ROWS = 512
_ITEM_BYTES = 128 << 10  # most weights of an item: about what is lost when the last one ends late
_FEWEST_ITEMS = 48
_NORM_ROWS = 4
_MAX_CHUNK = 18  # tiles along K of a panel that stay in the first-level cache
_SIDES = 4
_LINES = 32  # of counters of one call, 16 i32 each


@dataclass(frozen=True, slots=True)
class Norm:
    """A phase: RMS norm of `x` by `weight`, to `out`. Buffers go by name."""

    weight: str
    x: str
    out: str


@dataclass(frozen=True, slots=True)
class Matmul:
    """A phase: `x` times `weight`, to `out`, by epilogue plus `residual`, or as silu(gate) * up."""

    weight: str
    x: str
    out: str
    epilogue: Literal["store", "residual", "silu"] = "store"
    residual: str | None = None


Phase = Norm | Matmul


@dataclass(slots=True)
class _Calls:
    """The calls of one function of the module so far."""

    counters: Tensor
    number: int = 0


def takes_chains(spec: LlamaSpec, options: BuildOptions, target: Target) -> bool:
    """Whether the CPU has the matrix unit and the model fills its tiles."""
    sizes = (spec.hidden_size, spec.intermediate_size, spec.qkv_features, spec.vocab_size)
    heads = spec.num_attention_heads * spec.head_dim
    fills = all(size % _TILE == 0 for size in (*sizes, heads))
    return fills and target.has_amx and target.has_bf16_dot and options.activations == "bf16"


class AmxChains:
    """Implements CpuOperations."""

    def __init__(self, spec: LlamaSpec, weights: WeightTypes, render: Render) -> None:
        self._spec = spec
        self._weights = weights
        self._render = render
        self._calls: WeakKeyDictionary[Emitter, _Calls] = WeakKeyDictionary()
        # Of what may stay within a dispatch.
        self._row_bytes = {
            "sum": 4 * spec.hidden_size,
            "normed": 2 * spec.hidden_size,
            "gated": 2 * spec.intermediate_size,
        }

    def project(self, e: Emitter, x: Tensor) -> Tensor:
        results = {"qkv": self._spec.qkv_features}
        return self._run(e, "project", self._projection(0, "x"), {"x": x}, results)[0]

    def advance(self, e: Emitter, x: Tensor, attended: Tensor, layer: int) -> tuple[Tensor, Tensor | None]:
        block = f"blk.{layer}."
        phases: list[Phase] = [
            Matmul(f"{block}attn_output.weight", "attended", "sum", "residual", "x"),
            Norm(f"{block}ffn_norm.weight", "sum", "normed"),
            Matmul(f"{block}ffn_gate_up.weight", "normed", "gated", "silu"),
            Matmul(f"{block}ffn_down.weight", "gated", "y", "residual", "sum"),
        ]
        reads, hidden = {"x": x, "attended": attended}, self._spec.hidden_size
        if layer + 1 == self._spec.num_hidden_layers:
            return self._run(e, "finish", phases, reads, {"y": hidden})[0], None
        phases += self._projection(layer + 1, "y")
        x, qkv = self._run(e, "advance", phases, reads, {"y": hidden, "qkv": self._spec.qkv_features})
        return x, qkv

    def logits(self, e: Emitter, x: Tensor) -> Tensor:
        phases: list[Phase] = [
            Norm("output_norm.weight", "x", "normed"),
            Matmul(self._spec.head_weight, "normed", "logits"),
        ]
        return self._run(e, "logits", phases, {"x": x}, {"logits": self._spec.vocab_size})[0]

    def _projection(self, layer: int, x: str) -> list[Phase]:
        return [
            Norm(f"blk.{layer}.attn_norm.weight", x, "normed"),
            Matmul(f"blk.{layer}.attn_qkv.weight", "normed", "qkv"),
        ]

    def _run(
        self,
        e: Emitter,
        name: str,
        phases: Sequence[Phase],
        reads: dict[str, Tensor],
        results: dict[str, int],
    ) -> list[Tensor]:
        """Dispatches the phases. `results`: outputs that leave the dispatch, f32, with their features."""
        assert 1 + len(phases) * (1 + _SIDES) <= _LINES
        scratch = {phase.out: self._row_bytes[phase.out] for phase in phases if phase.out not in results}
        parameters = [self._weights.load(e, phase.weight) for phase in phases]
        kernel = self._render(
            "chain_amx",
            name,
            phases=[self._describe(index, phase, scratch) for index, phase in enumerate(phases)],
            reads=[*reads, *(_binding(i, j) for i, held in enumerate(parameters) for j in range(len(held)))],
            results=list(results),
            scratch=scratch,
            norm_size=self._spec.hidden_size,
            eps=self._spec.rms_norm_eps,
            max_chunk=_MAX_CHUNK,
            sides=_SIDES,
            lines=_LINES,
        )
        rows = next(iter(reads.values())).shape[0]
        calls = self._calls_of(e)
        whole_tiles = e.times(e.ceil_divide(rows, _TILE_ROWS), _TILE_ROWS)
        made = e.dispatch(
            kernel,
            [rows],
            [rows, calls.number],
            [*reads.values(), *(tensor for held in parameters for tensor in held)],
            [
                calls.counters,
                *(((rows, features), "f32") for features in results.values()),
                ((whole_tiles, sum(scratch.values())), "i8"),
            ],
        )
        calls.counters, calls.number = made[0], calls.number + 1
        return made[1:-1]

    def _calls_of(self, e: Emitter) -> _Calls:
        if e not in self._calls:
            most = self._spec.num_hidden_layers + 2
            self._calls[e] = _Calls(e.fill("0", (most, 16 * _LINES), "i32"))
        return self._calls[e]

    def _describe(self, index: int, phase: Phase, scratch: dict[str, int]) -> dict[str, Any]:
        """The phase as the template takes it."""
        common = {"index": index, "x": phase.x, "out": phase.out, "weight": _binding(index, 0)}
        if isinstance(phase, Norm):
            return {"operation": "norm", "row_block": _NORM_ROWS, **common}
        out_features, in_features = self._weights.shape(phase.weight)
        bits = self._weights.layout(phase.weight).bits
        row_block = _ROWS_BYTES // (2 * in_features) // _TILE * _TILE
        return {
            "operation": "matmul",
            **common,
            "scales": _binding(index, 1) if bits else None,
            "residual": phase.residual,
            "x_tiled": phase.x in scratch,
            "n": out_features,
            "k_size": in_features,
            "bits": bits,
            "epilogue": phase.epilogue,
            "row_block": max(_TILE, min(row_block, _MOST_ROWS)),
            "panels_per_item": _panels_per_item(out_features, in_features, phase.epilogue),
        }


def _binding(phase: int, parameter: int) -> str:
    """The name of a phase's weight, or, second, its scales."""
    return f"{'ws'[parameter]}{phase}"


def _panels_per_item(out_features: int, in_features: int, epilogue: str) -> int:
    panels = out_features // _TILE
    most = min(panels // _FEWEST_ITEMS, _ITEM_BYTES // (2 * in_features * _TILE))
    # Two gated panels fill a row of a tile, which two workers had better not share.
    return max(2, most // 2 * 2) if epilogue == "silu" else max(1, most)
