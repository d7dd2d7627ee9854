"""Rotary embedding, KV store and paged attention: hand-written vector kernels for any CPU.

Each class of attention kernels defines its own layout of K and V in a page; no other code reads pages.
"""

from __future__ import annotations

from typing import Any

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Dim, Emitter, Tensor
from shortfin_apps.llm.builder.graph.token_layout import attention_tiles
from shortfin_apps.llm.builder.kernels.cpu.decode_attention import VectorDecodeGeometry
from shortfin_apps.llm.builder.kernels.cpu.kv_pages import KvPages
from shortfin_apps.llm.builder.kernels.cpu.paged_attention import PagedAttentionGeometry
from shortfin_apps.llm.builder.kernels.cpu.rope_store import RopeStoreGeometry
from shortfin_apps.llm.builder.lowering.dispatch import dispatch
from shortfin_apps.llm.builder.lowering.lowering import Kernels
from shortfin_apps.llm.builder.weights.parameters import WeightTypes
from shortfin_apps.llm.model.attention import Attend, Attention
from shortfin_apps.llm.model.spec import BuildOptions


class VectorAttention(Kernels):
    """Attend kernels for any CPU."""

    def decode_geometry(self, block: Attention, batch: Batch) -> VectorDecodeGeometry:
        """Return the geometry of the decode kernel, for sequences with one new token each."""
        return VectorDecodeGeometry(self._rope_geometry(block, batch), self._geometry(block, batch))

    def _geometry(self, block: Attention, batch: Batch) -> PagedAttentionGeometry:
        return PagedAttentionGeometry(
            dtype=self._options.activations,
            kv_dtype=self._options.cache_dtype,
            has_wide_vectors=self._target.has_wide_vectors,
            window=block.window,
            score_cap=block.cap,
            has_sinks=block.sinks,
            **attention_shape(block, self._options, batch),
        )

    def _rope_geometry(self, block: Attention, batch: Batch) -> RopeStoreGeometry:
        shape = attention_shape(block, self._options, batch)
        return RopeStoreGeometry(kv_dtype=self._options.cache_dtype, **shape)

    def attend(self, e: Emitter, operation: Attend, qkv: Tensor, batch: Batch) -> Tensor:
        q = self._rope_store(e, operation, qkv, batch)
        if operation.only_stores:
            return q
        geometry = self._geometry(operation.block, batch)
        name = "paged_attention" if geometry.window is None else "windowed_attention"
        kernel = self._render("cpu/paged_attention", name, g=geometry)
        workload, constants = token_grid(e, operation.layer, batch, geometry.tile_tokens)
        rows, positions, tiles = token_geometry(e, batch, geometry.tile_tokens)
        operands = {
            **_batch_operands(geometry, constants, batch),
            "q": q,
            "token_rows": rows,
            "positions": positions,
            "tiles": tiles,
            **sinks(e, self._weights, operation),
            "cache": batch.cache,
        }
        return dispatch(e, kernel, geometry.interface, workload, operands)["out"]

    def _rope_store(self, e: Emitter, operation: Attend, qkv: Tensor, batch: Batch) -> Tensor:
        """Emit rotary embedding and KV store; return q [tokens, heads * head_dim] f32."""
        geometry = self._rope_geometry(operation.block, batch)
        kernel = self._render("cpu/rope_store", f"rope_store{batch.slab.suffix}", g=geometry)
        workload, constants = token_grid(e, operation.layer, batch, self._options.block_seq_stride)
        operands = {
            **_batch_operands(geometry, constants, batch),
            "qkv": qkv,
            "rotary": batch.rotary,
            "token_rows": batch.token_rows,
            "positions": batch.positions,
            "cache": batch.cache,
        }
        written = dispatch(e, kernel, geometry.interface, workload, operands)
        batch.cache = written["cache"]
        return written["q"]


def _batch_operands(pages: KvPages, constants: list[Dim], batch: Batch) -> dict[str, Dim | Tensor]:
    """Return the operands for the batch's sequences that rope_store and paged_attention have in common."""
    rows = {"seq_lens": batch.seq_lens, "blocks": batch.blocks}
    return {**dict(zip(pages.constants, constants, strict=True)), **rows}


def sinks(e: Emitter, weights: WeightTypes, operation: Attend) -> dict[str, Tensor]:
    """Return the operand `sinks` with the layer's attention sinks; empty if the layer has none."""
    return {} if operation.sinks is None else {"sinks": weights.load_one(e, operation.sinks)}


def attention_shape(block: Attention, options: BuildOptions, batch: Batch) -> dict[str, Any]:
    """Return the parameters that all attention kernels have in common."""
    return {
        "q_heads": block.heads,
        "kv_heads": block.kv_heads,
        "head_dim": block.head_dim,
        "stride": options.block_seq_stride,
        "page_elements": batch.cache.shape[1],
    }


def token_grid(e: Emitter, layer: int, batch: Batch, block: int) -> tuple[list[Dim], list[Dim]]:
    """Return the workload and the constants of a kernel that processes all tokens.

    A workgroup handles `block` tokens if each sequence's tokens fill whole pages, otherwise one token.
    """
    block = block if batch.whole_pages else 1
    constants = [batch.tokens, batch.rows, block, batch.width, batch.pages, batch.place_of(layer)]
    return [_quotient(e, batch.tokens, block)], constants


def token_geometry(e: Emitter, batch: Batch, size: int) -> list[Tensor]:
    """Return the index of each token's sequence, its position and its tile size; three tensors [tokens] i64.

    The tile size of a tile's first token is the number of the tile's tokens, at most `size`. The tile size of
    other tokens is 0.
    """
    if size not in batch.tiles:
        batch.tiles[size] = attention_tiles(
            e, batch.token_rows, batch.positions, batch.starts, batch.seq_lens, size
        )
    return [batch.token_rows, batch.positions, batch.tiles[size]]


def _quotient(e: Emitter, dividend: Dim, divisor: int) -> Dim:
    if isinstance(dividend, int):
        return dividend // divisor
    if divisor == 1:
        return dividend
    return e.value(f"arith.divui {dividend}, {e.constant(divisor)} : index")
