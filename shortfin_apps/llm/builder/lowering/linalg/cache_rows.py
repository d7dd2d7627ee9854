"""Addresses of the rows of a KV cache in linalg, and the write of new rows.

A page is [layers, planes, stride, row elements]. The planes of a layer are K and V, or a single one if a
value is a part of its key.
"""

from __future__ import annotations

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.graph.token_layout import cache_slots
from shortfin_apps.llm.builder.lowering.linalg.packed_attention import token_slots


def cache_rows(e: Emitter, batch: Batch, row: int, stride: int) -> Tensor:
    """Return the current slab's cache as [cache rows, row]; `row`: elements of a cache row."""
    return e.reshape(batch.cache, (e.times(batch.pages, batch.page_rows(stride)), row))


def last_row_of(e: Emitter, cache: Tensor) -> str:
    """Return the index of the last row of `cache_rows`."""
    return e.value(f"arith.subi {e.index(cache.shape[0])}, {e.constant(1)} : index")


def plane_offset(batch: Batch, layer: int, plane: int, stride: int) -> int:
    """Return the first cache row, within a page, of the layer's K (plane 0) or V (plane 1)."""
    return (batch.place_of(layer) * batch.slab.planes + plane) * stride


def write_rows(e: Emitter, batch: Batch, update: Tensor, layer: int, plane: int, stride: int) -> None:
    """Write a row of `update` [tokens, row] for each token to a plane of the layer."""
    cache, (_, row) = batch.cache, update.shape
    assert isinstance(row, int)
    rows, target = _token_rows(e, batch, layer, plane, stride), cache_rows(e, batch, row, stride)
    # Indices are unique except for padding tokens: these write to page 0, in any order.
    written = e.tensor(
        f"iree_linalg_ext.scatter dimension_map = [0] unique_indices(true) "
        f"ins({update.name}, {rows.name} : {update.type}, {rows.type}) "
        f"outs({target.name} : {target.type}) {{\n^bb0(%new: {cache.dtype}, %old: {cache.dtype}):\n"
        f"  iree_linalg_ext.yield %new : {cache.dtype}\n}} -> {target.type}",
        target.shape,
        cache.dtype,
    )
    batch.cache = e.reshape(written, cache.shape)


def seen_slots(e: Emitter, batch: Batch, window: int | None, stride: int) -> Tensor:
    """Return the `token_slots` of the batch, which are computed once for all layers."""
    if window not in batch.token_slots:
        batch.token_slots[window] = token_slots(
            e, batch.blocks, batch.token_rows, batch.positions, stride, batch.page_rows(stride), window
        )
    return batch.token_slots[window]


def _token_rows(e: Emitter, batch: Batch, layer: int, plane: int, stride: int) -> Tensor:
    """Return the cache row of each token in a plane of the layer, [tokens, 1] i64."""
    if batch.slots is None:
        batch.slots = cache_slots(e, batch, stride, batch.page_rows(stride))
    body = f"""\
  %offset = arith.constant {plane_offset(batch, layer, plane, stride)} : i64
  %row = arith.addi %a, %offset : i64
  linalg.yield %row : i64"""
    return e.elementwise("tu", ("tu", (batch.tokens, 1), "i64"), [(batch.slots, "t")], body)
