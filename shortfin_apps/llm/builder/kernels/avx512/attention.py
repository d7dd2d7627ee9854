"""Geometry of attention over the paged KV cache, in the layout for AVX-512 with bf16 and AMX."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shortfin_apps.llm.builder.kernels.activations import TILE_BYTES, TILE_ROW_BYTES, TILE_ROWS
from shortfin_apps.llm.builder.kernels.interface import Regions
from shortfin_apps.llm.contract.config import SCALE_BYTES

_POINTER_BYTES = 8
_LOG2_E = 1.4426950408889634
_VECTOR_SUMS = 16  # the vector registers of 32 that hold sums
_WIDE_BYTES = 32 << 10  # bytes of pages that a step widens to bf16, which must stay in a near cache


def widened_slots(head_dim: int) -> int:
    """Return the maximum slots of a head's K and V that a step of attention widens to bf16."""
    return _WIDE_BYTES // (4 * head_dim)


@dataclass(frozen=True, kw_only=True)
class KVPagesGeometry:
    """KV pages of `stride` slots of all layers, in tiles, each head's K before its V (rope_function.mlir.j2).

    `head_dim` must be a multiple of 32, `stride` of 16. Elements are bf16 or, if `is_quantised`, int8. Then
    a head's K, and likewise its V, is followed by scales [stride] f32, one per token (cached_bytes.mlir.j2).
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    stride: int
    page_elements: int
    is_quantised: bool = False
    score_cap: float | None = None  # a score is cap * tanh(score / cap)

    @property
    def group(self) -> int:
        """Query heads that share a K/V head."""
        return self.q_heads // self.kv_heads

    @property
    def element_bytes(self) -> int:
        return 1 if self.is_quantised else 2

    @property
    def page_bytes(self) -> int:
        return self.element_bytes * self.page_elements

    @property
    def head_value_bytes(self) -> int:
        """Bytes of K or V of one head and layer of a page, without scales."""
        return self.element_bytes * self.stride * self.head_dim

    @property
    def head_bytes(self) -> int:
        """Bytes of K or V of one head and layer of a page."""
        return self.head_value_bytes + (SCALE_BYTES * self.stride if self.is_quantised else 0)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of one head and layer of a page."""
        return 2 * self.head_bytes

    @property
    def layer_bytes(self) -> int:
        return self.kv_heads * self.kv_bytes

    @property
    def k_tile_bytes(self) -> int:
        """Bytes of one head's K of sixteen slots, as stored in pages."""
        return TILE_ROWS * self.stored_head_bytes

    @property
    def stored_head_bytes(self) -> int:
        """Bytes of K or V of one head of a token, as stored in pages."""
        return self.element_bytes * self.head_dim

    @property
    def v_row_bytes(self) -> int:
        """Bytes of V of two tokens and sixteen elements of a head, as stored in pages."""
        return 2 * TILE_ROWS * self.element_bytes

    @property
    def query_bytes(self) -> int:
        """Bytes of one head of a token in bf16."""
        return 2 * self.head_dim

    @property
    def f32_head_bytes(self) -> int:
        """Bytes of one head of a token in f32, and of the token's RoPE cosines and sines."""
        return 4 * self.head_dim

    @property
    def group_bytes(self) -> int:
        """Bytes of a token's query heads that share a K/V head, in bf16."""
        return self.group * self.query_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of all query heads of a token, in bf16."""
        return self.q_heads * self.query_bytes

    @property
    def qkv_row_bytes(self) -> int:
        """Bytes of q, k and v of a token, in f32."""
        return (self.q_heads + 2 * self.kv_heads) * self.f32_head_bytes

    @property
    def query_scale(self) -> float:
        """The factor of q: log2(e) / sqrt(head_dim), so that softmax weights are powers of 2 of the scores.

        With a cap, the factor makes scores fractions of the cap instead, for the cap's tanh.
        """
        return (_LOG2_E if self.score_cap is None else 1 / self.score_cap) / math.sqrt(self.head_dim)

    @property
    def capped_scale(self) -> float:
        """The factor of the cap's tanh: cap * log2(e).

        Softmax weights are then powers of 2 of the scores.
        """
        assert self.score_cap is not None
        return self.score_cap * _LOG2_E

    @property
    def rope_local(self) -> Regions:
        """Scratch memory of rope_function: one head's K of sixteen tokens, as stored.

        If `is_quantised`, also one head's V of sixteen tokens, and one head in f32.
        """
        stored = TILE_ROWS * self.stored_head_bytes
        if not self.is_quantised:
            return Regions({"keys": stored})
        return Regions({"keys": stored, "values": stored, "head": self.f32_head_bytes})


@dataclass(frozen=True, kw_only=True)
class PagedAttentionGeometry(KVPagesGeometry):
    """Attention of up to `tile_tokens` tokens, in steps of `step_slots` slots (attention_function.mlir.j2).

    A query, a head of a token, attends to the last `window` slots; None: to all slots. `has_sinks`: the
    softmax of each head includes one more score, without a value. `has_tiles`: AMX, otherwise vectors.
    """

    tile_tokens: int
    step_slots: int
    window: int | None = None
    has_sinks: bool = False
    has_tiles: bool = True

    @property
    def query_block(self) -> int:
        """Queries that share each load of K or V on vectors.

        The queries of a tile are divided into blocks of near-equal size.
        """
        most = max(1, _VECTOR_SUMS // max(self.step_pages * self.slot_tiles, self.accumulators))
        queries = TILE_ROWS if self.tile_tokens > 1 else min(self.group, TILE_ROWS)
        return -(-queries // -(-queries // most))

    @property
    def prefetches_lines(self) -> bool:
        """Whether the vector kernel prefetches a line of the next step's pages with each loaded line."""
        return self.tile_tokens == 1 and self.group <= TILE_ROWS and not self.is_quantised

    @property
    def query_tiles(self) -> int:
        """Tiles of sixteen queries; a query is a head of a token."""
        return -(-self.tile_tokens * self.group // TILE_ROWS)

    @property
    def step_pages(self) -> int:
        return max(1, self.step_slots // self.stride)

    @property
    def slot_tiles(self) -> int:
        """Tiles of scores per page, of sixteen slots each."""
        return self.stride // 16

    @property
    def dim_tiles(self) -> int:
        """Tiles of 32 elements of a head, over which scores are summed."""
        return self.head_dim // 32

    @property
    def keeps_queries(self) -> bool:
        """Whether all of q fits into the AMX tile registers 1 to 4."""
        return self.dim_tiles <= 4

    @property
    def out_tiles(self) -> int:
        """Tiles of 16 elements of a head of the result."""
        return self.head_dim // 16

    @property
    def accumulators(self) -> int:
        """Result tiles that are computed together."""
        return next(n for n in (4, 3, 2) if self.out_tiles % n == 0)

    @property
    def v_slots(self) -> int:
        """Slots per tile of V, stored in pairs."""
        return 32 if self.stride % 32 == 0 else 16

    @property
    def v_tiles(self) -> int:
        """Tiles of V per page, along the slots."""
        return self.stride // self.v_slots

    @property
    def v_tile_bytes(self) -> int:
        return TILE_ROW_BYTES * self.v_slots // 2

    @property
    def v_dims_bytes(self) -> int:
        """Bytes of V of sixteen elements of a head in a page."""
        return self.v_tiles * self.v_tile_bytes

    @property
    def weight_row_bytes(self) -> int:
        """Bytes of a query's row in a tile of softmax weights in bf16."""
        return 2 * self.v_slots

    def weights_at(self, slot_tile: int) -> int:
        """Return the byte offset, within a page's softmax weights, of a query's weights of sixteen slots."""
        v_tile, slot = divmod(TILE_ROWS * slot_tile, self.v_slots)
        return v_tile * self.v_tile_bytes + 2 * slot

    def pair_at(self, pair: int) -> int:
        """Return the byte offset, within a page's softmax weights, of a query's weights of two slots."""
        v_tile, in_tile = divmod(2 * pair, self.v_slots)
        return v_tile * self.v_tile_bytes + 2 * in_tile

    @property
    def wide_head_bytes(self) -> int:
        """Bytes of K or V of one head and layer of a page, in bf16."""
        return 2 * self.stride * self.head_dim

    @property
    def wide_kv_bytes(self) -> int:
        """Bytes of K and V of one head and layer of a page, in bf16."""
        return 2 * self.wide_head_bytes

    @property
    def page_score_bytes(self) -> int:
        """Bytes of the scores of sixteen queries over a page, in f32."""
        return TILE_ROW_BYTES * self.stride

    @property
    def page_weight_bytes(self) -> int:
        """Bytes of the softmax weights of sixteen queries over a page, in bf16."""
        return self.page_score_bytes // 2

    def round_lines(self, quarters: int) -> int:
        """Return the cache lines of each page to prefetch per round (one round per page of a step).

        All rounds of a step together prefetch `quarters` quarters of each page's K and V.
        """
        return -(-quarters * self.kv_bytes // (4 * TILE_ROW_BYTES * self.step_pages))

    @property
    def local(self) -> Regions:
        """Scratch memory, which the caller of the function allocates."""
        pointers = -(-2 * self.step_pages * _POINTER_BYTES // TILE_ROW_BYTES) * TILE_ROW_BYTES
        return Regions(
            {
                "config": 64,
                "sums": self.query_tiles * TILE_ROWS * self.f32_head_bytes,
                "totals": self.query_tiles * TILE_BYTES,
                "maxima": self.query_tiles * TILE_ROW_BYTES,
                "bounds": self.query_tiles * TILE_ROW_BYTES,
                "factors": TILE_ROW_BYTES,
                "gathered": TILE_BYTES,
                "scores": self.step_pages * self.page_score_bytes,
                "weights": self.step_pages * self.page_weight_bytes,
                **self._pages,
                "k_pages": pointers,
                "v_pages": pointers,
            }
        )

    @property
    def _pages(self) -> dict[str, int]:
        """Regions for copies of pages that attention cannot read in place.

        Quantised: all pages of a step, widened to bf16. Otherwise: V of the last page and, with a window, of
        the first page, as attention may read only some of their slots.
        """
        if self.is_quantised:
            return {"wide_pages": self.step_pages * self.wide_kv_bytes}
        return {"last_values": self.head_bytes, "first_values": self.head_bytes if self.window else 0}


@dataclass(frozen=True, kw_only=True)
class DecodeAttentionGeometry(PagedAttentionGeometry):
    """Rotary embedding, cache write and attention of one token (decode_attention_function.mlir.j2)."""

    @property
    def token_local(self) -> Regions:
        """Scratch memory, which the caller of the function allocates."""
        q = -(-self.group_bytes // TILE_ROW_BYTES) * TILE_ROW_BYTES
        return Regions({"q": q, "rope": self.rope_local.bytes, "rest": self.local.bytes})

    def extra_results(self, out: str) -> dict[str, tuple[int, str]]:
        """Return the dispatch's results besides the stages' buffers, by name: (features, dtype)."""
        return {}
