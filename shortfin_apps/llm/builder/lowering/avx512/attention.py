"""Rotary embedding, KV store and paged attention in bf16, hand-written for AVX-512 and AMX."""

from __future__ import annotations

from typing import Any

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Dim, Emitter, Tensor
from shortfin_apps.llm.builder.kernels.avx512.attention import (
    DecodeAttentionGeometry,
    KVPagesGeometry,
    PagedAttentionGeometry,
    widened_slots,
)
from shortfin_apps.llm.builder.lowering.cpu.attention import (
    attention_shape,
    sinks,
    token_geometry,
    token_grid,
)
from shortfin_apps.llm.builder.lowering.lowering import Kernels
from shortfin_apps.llm.model.attention import Attend, Attention
from shortfin_apps.llm.model.kv_layout import KeysValues
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec

_LANES = 16  # rows and columns of one accumulator tile
_MOST_QUERIES = 64  # maximum (token, head) pairs of a tile, so that their state fits the first-level cache
_SUM_BYTES = 64 << 10  # maximum bytes of a tile's results, which are on the worker's stack
_STEP_SLOTS = 64  # maximum slots of K and V per step of the running softmax


def fills_attention_tiles(spec: ModelSpec, options: BuildOptions) -> bool:
    """Whether heads and pages consist of whole bf16 tiles.

    For q8_0, also whether pages are short enough for a step of attention to dequantise one.
    """
    layouts = (layout for _, layout in spec.kv_layouts)
    dims = {layout.head_dim for layout in layouts if isinstance(layout, KeysValues)}
    stride = options.block_seq_stride
    is_whole = all(dim % (2 * _LANES) == stride % _LANES == 0 for dim in dims)
    return is_whole and (options.kv != "q8_0" or all(stride <= widened_slots(dim) for dim in dims))


def kernel_name(name: str, geometry: PagedAttentionGeometry) -> str:
    """Return the kernel's name, with a prefix if its layers have a window.

    The size of the window is not in the name, as a model has at most one.
    """
    return name if geometry.window is None else f"windowed_{name}"


class Bf16Attention(Kernels):
    """Attend kernels for a bf16 or q8_0 cache. Callers must check `fills_attention_tiles`.

    With AVX-512 and AMX, pages have the same layout. Only the two matmuls of attention differ.
    """

    def attend(self, e: Emitter, operation: Attend, qkv: Tensor, batch: Batch) -> Tensor:
        if batch.chunk == 1 and not operation.only_stores:
            return self._decode(e, operation, qkv, batch)
        q = self._rope_store(e, operation, qkv, batch)
        if operation.only_stores:
            return e.reshape(q, (batch.tokens, operation.block.q_features))
        geometry = self._geometry(operation.block, batch)
        kernel = self._render("avx512/paged_attention", kernel_name("paged_attention", geometry), g=geometry)
        workload, constants = token_grid(e, operation.layer, batch, _LANES)
        return e.dispatch(
            kernel,
            workload,
            constants,
            [
                *(q, *token_geometry(e, batch, _LANES), batch.seq_lens, batch.blocks, batch.cache),
                *sinks(e, self._weights, operation).values(),
            ],
            [self._result(operation.block, batch)],
        )[0]

    def decode_geometry(self, block: Attention, batch: Batch) -> DecodeAttentionGeometry:
        """Return the geometry of the decode kernel, for sequences with one new token each."""
        return DecodeAttentionGeometry(**self._sizes(block, batch), tile_tokens=1)

    def _geometry(self, block: Attention, batch: Batch) -> PagedAttentionGeometry:
        queries = min(_MOST_QUERIES, _SUM_BYTES // (4 * block.head_dim))
        tile_tokens = max(1, min(_LANES, queries // (block.heads // block.kv_heads)))
        return PagedAttentionGeometry(**self._sizes(block, batch), tile_tokens=tile_tokens)

    def _sizes(self, block: Attention, batch: Batch) -> dict[str, Any]:
        slots = min(_STEP_SLOTS, widened_slots(block.head_dim)) if self._options.kv == "q8_0" else _STEP_SLOTS
        return {
            **self._shape(block, batch),
            "step_slots": slots,
            "window": block.window,
            "has_sinks": block.sinks,
            "has_tiles": self._target.has_amx,
        }

    def _shape(self, block: Attention, batch: Batch) -> dict[str, Any]:
        shape = attention_shape(block, self._options, batch)
        return {**shape, "is_quantised": self._options.kv == "q8_0", "score_cap": block.cap}

    def _rope_store(self, e: Emitter, operation: Attend, qkv: Tensor, batch: Batch) -> Tensor:
        """Emit rotary embedding and KV store; return q [kv_heads, tokens, group * head_dim] bf16.

        `group`: query heads per K/V head.
        """
        block = operation.block
        kernel = self._render(
            "avx512/rope_store",
            f"rope_store{batch.slab.suffix}",
            g=KVPagesGeometry(**self._shape(block, batch)),
        )
        workload, constants = token_grid(e, operation.layer, batch, _LANES)
        q_shape = (block.kv_heads, batch.tokens, block.q_features // block.kv_heads)
        q, batch.cache = e.dispatch(
            kernel,
            workload,
            constants,
            [qkv, batch.rotary, *token_geometry(e, batch, _LANES), batch.seq_lens, batch.blocks],
            [(q_shape, "bf16"), batch.cache],
        )
        return q

    def _decode(self, e: Emitter, operation: Attend, qkv: Tensor, batch: Batch) -> Tensor:
        """Emit rotary embedding, KV store and attention in one dispatch, for one new token per sequence."""
        geometry = self.decode_geometry(operation.block, batch)
        kernel = self._render(
            "avx512/decode_attention", kernel_name("decode_attention", geometry), g=geometry
        )
        batch.cache, out = e.dispatch(
            kernel,
            [batch.rows],
            [batch.rows, batch.width, batch.pages, batch.place_of(operation.layer)],
            [
                *(qkv, batch.rotary, batch.starts, batch.seq_lens, batch.blocks),
                *sinks(e, self._weights, operation).values(),
            ],
            [batch.cache, self._result(operation.block, batch)],
        )
        return out

    def _result(self, block: Attention, batch: Batch) -> tuple[tuple[Dim, int], str]:
        return (batch.tokens, block.q_features), "bf16"
