"""Rotary embedding, KV store and paged attention in bf16, hand-written for AVX-512 and AMX."""

from __future__ import annotations

from typing import Any

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Dim, Emitter, Tensor
from shortfin_apps.llm.builder.kernels import Render
from shortfin_apps.llm.builder.kernels.avx512.attention import (
    DecodeAttentionGeometry,
    KVPagesGeometry,
    PagedAttentionGeometry,
    widened_slots,
)
from shortfin_apps.llm.builder.lowering.cpu.attention import attention_shape, token_geometry, token_grid
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.parameters import WeightTypes
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec

_LANES = 16  # rows and columns of one accumulator tile
_MOST_QUERIES = 64  # limit of a tile of tokens: the queries' state must fit the first-level cache
_SUM_BYTES = 64 << 10  # results of such a tile, on the worker's stack
_STEP_SLOTS = 64


def fills_attention_tiles(spec: ModelSpec, options: BuildOptions) -> bool:
    """Whether heads and pages are whole bf16 tiles and, for q8_0, pages are short enough to widen."""
    is_whole = spec.head_dim % (2 * _LANES) == options.block_seq_stride % _LANES == 0
    return is_whole and (options.kv != "q8_0" or options.block_seq_stride <= widened_slots(spec.head_dim))


def kernel_name(name: str, geometry: PagedAttentionGeometry) -> str:
    """Return the kernel's name, marked if its layers have a window; a model has at most one window size."""
    return name if geometry.window is None else f"windowed_{name}"


class Bf16Attention:
    """Attend kernels for K and V in bf16 or q8_0; see `fills_attention_tiles`.

    AVX-512 and AMX use the same pages, and the same steps except for the two products.
    """

    def __init__(
        self, spec: ModelSpec, options: BuildOptions, weights: WeightTypes, render: Render, target: Target
    ) -> None:
        self._target = target
        self._spec = spec
        self._options = options
        self._weights = weights
        self._render = render
        self._group = spec.num_attention_heads // spec.num_key_value_heads
        self._is_quantised = options.kv == "q8_0"

    def attend(self, e: Emitter, qkv: Tensor, layer: int, batch: Batch) -> Tensor:
        if batch.chunk == 1:
            return self._decode(e, qkv, layer, batch)
        q = self._rope_store(e, qkv, layer, batch)
        geometry = self._geometry(layer, batch)
        kernel = self._render("avx512/paged_attention", kernel_name("paged_attention", geometry), g=geometry)
        workload, constants = token_grid(e, layer, batch, _LANES)
        return e.dispatch(
            kernel,
            workload,
            constants,
            [
                *(q, *token_geometry(e, batch, _LANES), batch.seq_lens, batch.blocks, batch.cache),
                *self.sinks(e, layer).values(),
            ],
            [self._result(batch)],
        )[0]

    def sinks(self, e: Emitter, layer: int) -> dict[str, Tensor]:
        """Return the layer's sinks by their operand name; empty if it has none."""
        weight = self._spec.sinks_of(layer)
        return {} if weight is None else {"sinks": self._weights.load_one(e, weight)}

    def decode_geometry(self, layer: int, batch: Batch) -> DecodeAttentionGeometry:
        """Return the geometry of the kernel for rows of one token each."""
        return DecodeAttentionGeometry(**self._sizes(layer, batch), tile_tokens=1)

    def _geometry(self, layer: int, batch: Batch) -> PagedAttentionGeometry:
        queries = min(_MOST_QUERIES, _SUM_BYTES // (4 * self._spec.head_dim))
        tile_tokens = max(1, min(_LANES, queries // self._group))
        return PagedAttentionGeometry(**self._sizes(layer, batch), tile_tokens=tile_tokens)

    def _sizes(self, layer: int, batch: Batch) -> dict[str, Any]:
        window = self._spec.window_of(layer)
        slots = min(_STEP_SLOTS, widened_slots(self._spec.head_dim)) if self._is_quantised else _STEP_SLOTS
        has_sinks = self._spec.sinks_of(layer) is not None
        return {
            **self._shape(batch),
            "step_slots": slots,
            "window": window,
            "has_sinks": has_sinks,
            "has_tiles": self._target.has_amx,
        }

    def _shape(self, batch: Batch) -> dict[str, Any]:
        shape = attention_shape(self._spec, self._options, batch)
        return {**shape, "is_quantised": self._is_quantised, "score_cap": self._spec.score_cap}

    def _rope_store(self, e: Emitter, qkv: Tensor, layer: int, batch: Batch) -> Tensor:
        """Emit rotary embedding and KV store; return q [kv_heads, tokens, group * head_dim] bf16."""
        kernel = self._render(
            "avx512/rope_store", f"rope_store{batch.slab.suffix}", g=KVPagesGeometry(**self._shape(batch))
        )
        workload, constants = token_grid(e, layer, batch, _LANES)
        q_shape = (self._spec.num_key_value_heads, batch.tokens, self._group * self._spec.head_dim)
        q, batch.cache = e.dispatch(
            kernel,
            workload,
            constants,
            [qkv, batch.rotary, *token_geometry(e, batch, _LANES), batch.seq_lens, batch.blocks],
            [(q_shape, "bf16"), batch.cache],
        )
        return q

    def _decode(self, e: Emitter, qkv: Tensor, layer: int, batch: Batch) -> Tensor:
        """Emit rotary embedding, KV store and attention in one dispatch, for rows of one token each."""
        geometry = self.decode_geometry(layer, batch)
        kernel = self._render(
            "avx512/decode_attention", kernel_name("decode_attention", geometry), g=geometry
        )
        batch.cache, out = e.dispatch(
            kernel,
            [batch.rows],
            [batch.rows, batch.width, batch.pages, batch.place_of(layer)],
            [
                *(qkv, batch.rotary, batch.starts, batch.seq_lens, batch.blocks),
                *self.sinks(e, layer).values(),
            ],
            [batch.cache, self._result(batch)],
        )
        return out

    def _result(self, batch: Batch) -> tuple[tuple[Dim, int], str]:
        return (batch.tokens, self._spec.num_attention_heads * self._spec.head_dim), "bf16"
