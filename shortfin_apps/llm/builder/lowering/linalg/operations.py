"""Operations in linalg and iree_linalg_ext only, for targets without hand-written kernels.

A page is [layers, (K, V), stride, kv_heads * head_dim]: a cache row per layer, plane (K or V) and token. In a
q8_0 cache, a row is bytes and scales (quantised_rows.py), which are dequantised to f32 on load. Attention
gathers the pages of each sequence and replaces slots without a token by zeros, so that stale contents (even
NaN) have no effect.
"""

from __future__ import annotations

from dataclasses import replace

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Dim, Emitter, Tensor, affine_map
from shortfin_apps.llm.builder.graph.token_layout import last_tokens
from shortfin_apps.llm.builder.lowering.linalg.bodies import (
    gated,
    reaches,
    sees,
    yield_as,
)
from shortfin_apps.llm.builder.lowering.linalg.cache_rows import (
    cache_rows,
    last_row_of,
    plane_offset,
    seen_slots,
    write_rows,
)
from shortfin_apps.llm.builder.lowering.linalg.embedding import embedding
from shortfin_apps.llm.builder.lowering.linalg.norms import add_normed, rms_norm
from shortfin_apps.llm.builder.lowering.linalg.packed_attention import CachePlane, packed_attention
from shortfin_apps.llm.builder.lowering.linalg.quantised_rows import dequantise, quantised_rows, scales_of
from shortfin_apps.llm.builder.lowering.linalg.sampling import advance, sample, store_tokens
from shortfin_apps.llm.builder.lowering.linalg.table import LOWERINGS
from shortfin_apps.llm.builder.lowering.linalg.top_k import top_k
from shortfin_apps.llm.builder.lowering.lowering import (
    Drawn,
    DrawState,
    Kernels,
    LeftRows,
    LoweringContext,
    Values,
)
from shortfin_apps.llm.contract.config import SCALE_BYTES
from shortfin_apps.llm.model.attention import Attend, Attention
from shortfin_apps.llm.model.operations import Activation, Operation


class LinalgOperations(Kernels):
    """Kernels of most operations, for any target; Linear and GatedLinear need row-major weights."""

    draws_rows = False

    def __init__(self, context: LoweringContext) -> None:
        super().__init__(context)
        self._context = context
        self._stride = self._options.block_seq_stride
        self._is_quantised = self._options.kv == "q8_0"
        self._wide = "f32" if self._is_quantised else self._options.kv  # dtype of attention's products

    def compute(self, e: Emitter, operation: Operation, values: Values) -> Tensor:
        return LOWERINGS[type(operation)](self._context, e, operation, values)

    def embed(self, e: Emitter, tokens: Tensor, weight: str) -> Tensor:
        return embedding(e, self._spec, self._weights, tokens, weight)

    def sample(self, e: Emitter, rows: LeftRows, state: DrawState, *, advances: bool) -> Drawn:
        """Draw from the candidates; sequences without top-k must be sampled on the host."""
        assert rows.row_indices is None, "draws_rows is False"
        token_ids = sample(e, rows.values, rows.indices, state.sampling, state.positions)
        stored = store_tokens(e, token_ids, state.slots, state.positions, state.last_tokens)
        positions = advance(e, state.positions, token_ids) if advances else state.positions
        return token_ids, replace(state, positions=positions, last_tokens=stored)

    def last_tokens(self, e: Emitter, x: Tensor, batch: Batch) -> Tensor:
        last = last_tokens(e, batch.offsets, batch.starts, batch.seq_lens, batch.tokens)
        body = f"""\
  %d = linalg.index 1 : index
  %token = arith.index_cast %a : i64 to index
  %value = tensor.extract {x.name}[%token, %d] : {x.type}
  linalg.yield %value : f32"""
        shape = (batch.rows, self._spec.hidden_size)
        return e.elementwise("rd", ("rd", shape, "f32"), [(last, "r")], body)

    def rms_norm(self, e: Emitter, x: Tensor, weight: str) -> Tensor:
        return rms_norm(e, self._spec, x, self._weights.load_one(e, weight), self._options.activations)

    def add_normed(self, e: Emitter, x: Tensor, weight: str, residual: Tensor) -> Tensor:
        return add_normed(e, self._spec, x, self._weights.load_one(e, weight), residual)

    def linear(self, e: Emitter, x: Tensor, weight: str, residual: Tensor | None = None) -> Tensor:
        w = self._weights.load_one(e, weight)
        shape = (x.shape[0], w.shape[0])
        zero = e.fill("0.0", shape, "f32")
        maps = ", ".join(affine_map("mnk", access) for access in ("mk", "nk", "mn"))
        out = e.tensor(
            f"linalg.matmul indexing_maps = [{maps}] ins({x.name}, {w.name} : {x.type}, {w.type}) "
            f"outs({zero.name} : {zero.type}) -> {zero.type}",
            shape,
            "f32",
        )
        if residual is None:
            return out
        add = "  %y = arith.addf %a, %b : f32\n  linalg.yield %y : f32"
        return e.elementwise("td", ("td", shape, "f32"), [(residual, "td"), (out, "td")], add)

    def gated_linear(self, e: Emitter, x: Tensor, weight: str, activation: Activation) -> Tensor:
        both = self.linear(e, x, weight)
        features = self._weights.shape(weight)[0] // 2
        gate, up = (e.columns(both, i * features, features) for i in range(2))
        return gated(e, gate, up, activation, self._options.activations)

    def attend(self, e: Emitter, operation: Attend, qkv: Tensor, batch: Batch) -> Tensor:
        q = self._rope_store(e, operation, qkv, batch)
        return q if operation.only_stores else self._attention(e, operation, q, batch)

    def _rope_store(self, e: Emitter, operation: Attend, qkv: Tensor, batch: Batch) -> Tensor:
        block, layer = operation.block, operation.layer
        heads, kv_heads = block.heads, block.kv_heads
        tokens, kv = batch.tokens, self._options.cache_dtype
        q = self._rotate(e, block, qkv, 0, heads, "f32", batch)
        k = self._rotate(e, block, qkv, heads, kv_heads, self._wide, batch)
        v_f32 = e.columns(qkv, (heads + kv_heads) * block.head_dim, block.kv_features)
        if self._is_quantised:
            k, v = (quantised_rows(e, x, kv_heads, self._row(block)) for x in (k, v_f32))
        else:
            v = e.elementwise("td", ("td", v_f32.shape, kv), [(v_f32, "td")], yield_as("%a", kv))
        for plane, update in enumerate((k, v)):
            write_rows(e, batch, update, layer, plane, self._stride)
        return e.reshape(q, (tokens, block.q_features))

    def _attention(self, e: Emitter, operation: Attend, q: Tensor, batch: Batch) -> Tensor:
        s, kv = operation.block, self._wide
        group = s.heads // s.kv_heads
        slots = e.times(batch.width, self._stride)
        if batch.chunk is None or s.cap is not None or s.sinks:
            return self._packed_attention(e, operation, q, batch)
        q = e.elementwise("td", ("td", q.shape, kv), [(q, "td")], yield_as("%a", kv))
        q = e.reshape(q, (batch.rows, batch.chunk, s.kv_heads, group, s.head_dim))
        kv_shape = (batch.rows, slots, s.kv_heads, s.head_dim)
        k, v = (e.reshape(self._gather(e, operation, plane, slots, batch), kv_shape) for plane in range(2))
        mask = self._mask(e, slots, s.window, batch)
        scale = e.value(f"arith.constant {s.head_dim**-0.5:.9e} : {kv}")
        out = e.empty(q.shape, "f32")
        # b: sequence, h: K/V head, g: its query head, c: query token, n: slot, k: element of q and K, d: of V
        accesses = ("bchgk", "bnhk", "bnhd", "", "bcn", "bchgd")
        maps = ", ".join(affine_map("bhgcnkd", access) for access in accesses)
        result = e.tensor(
            # Both IREE 3.9 and 3.13 parse the generic form.
            f'"iree_linalg_ext.attention"'
            f"({q.name}, {k.name}, {v.name}, {scale}, {mask.name}, {out.name}) "
            f"<{{indexing_maps = [{maps}], operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1>}}> ({{\n"
            f"^bb0(%score: f32):\n  iree_linalg_ext.yield %score : f32\n}}) : "
            f"({q.type}, {k.type}, {v.type}, {kv}, {mask.type}, {out.type}) -> {out.type}",
            q.shape,
            "f32",
        )
        return self._flat_heads(e, operation.block, result, batch)

    def _packed_attention(self, e: Emitter, operation: Attend, q: Tensor, batch: Batch) -> Tensor:
        block, sinks = operation.block, operation.sinks
        cache = self._cache_rows(e, block, batch)
        last_row = last_row_of(e, cache)
        keys, values = (
            CachePlane(
                cache,
                last_row,
                plane_offset(batch, operation.layer, plane, self._stride),
                block.kv_heads,
                scales_of(e, cache) if self._is_quantised else None,
            )
            for plane in range(2)
        )
        q = e.reshape(q, (batch.tokens, block.heads, block.head_dim))
        result = packed_attention(
            e,
            q,
            keys,
            values,
            seen_slots(e, batch, block.window, self._stride),
            block.cap,
            None if sinks is None else self._weights.load_one(e, sinks),
        )
        return self._flat_heads(e, operation.block, result, batch)

    def _flat_heads(self, e: Emitter, block: Attention, heads: Tensor, batch: Batch) -> Tensor:
        """Reshape f32 heads to [tokens, heads * head_dim], and convert them to the activations' dtype."""
        act = self._options.activations
        flat = e.reshape(heads, (batch.tokens, block.q_features))
        return e.elementwise("td", ("td", flat.shape, act), [(flat, "td")], yield_as("%a", act))

    def top_k(self, e: Emitter, logits: Tensor) -> tuple[Tensor, Tensor]:
        return top_k(e, logits, self._options.top_k)

    def _rotate(
        self,
        e: Emitter,
        block: Attention,
        qkv: Tensor,
        first_head: int,
        heads: int,
        dtype: str,
        batch: Batch,
    ) -> Tensor:
        """Rotate the `heads` heads of qkv from `first_head` on; return [tokens, heads * head_dim] `dtype`."""
        dim = block.head_dim
        c0, c1 = e.constant(0), e.constant(1)
        body = f"""\
  %t = linalg.index 0 : index
  %h = linalg.index 1 : index
  %d = linalg.index 2 : index
  %dim = arith.constant {dim} : index
  %half = arith.constant {dim // 2} : index
  %first = arith.constant {first_head * dim} : index
  %in_heads = arith.muli %h, %dim : index
  %column = arith.addi %first, %in_heads : index
  %angle = arith.remui %d, %half : index
  %is_low = arith.cmpi ult, %d, %half : index
  %other_past = arith.addi %d, %half : index
  %other = arith.remui %other_past, %dim : index
  %own_column = arith.addi %column, %d : index
  %other_column = arith.addi %column, %other : index
  %own = tensor.extract {qkv.name}[%t, %own_column] : {qkv.type}
  %partner = tensor.extract {qkv.name}[%t, %other_column] : {qkv.type}
  %cos = tensor.extract {batch.rotary.name}[%t, {c0}, %angle] : {batch.rotary.type}
  %sin = tensor.extract {batch.rotary.name}[%t, {c1}, %angle] : {batch.rotary.type}
  %minus = arith.negf %partner : f32
  %turned = arith.select %is_low, %minus, %partner : f32
  %along = arith.mulf %own, %cos : f32
  %across = arith.mulf %turned, %sin : f32
  %y = arith.addf %along, %across : f32
{yield_as("%y", dtype)}"""
        rotated = e.elementwise("thd", ("thd", (batch.tokens, heads, dim), dtype), [], body)
        return e.reshape(rotated, (batch.tokens, heads * dim))

    def _row(self, block: Attention) -> int:
        """Return the number of elements of a cache row."""
        return block.read_layout.row_elements(self._options.kv)

    def _cache_rows(self, e: Emitter, block: Attention, batch: Batch) -> Tensor:
        return cache_rows(e, batch, self._row(block), self._stride)

    def _gather(self, e: Emitter, operation: Attend, plane: int, slots: Dim, batch: Batch) -> Tensor:
        """Gather K or V of the slots of each sequence, [rows, slots, kv_heads * head_dim].

        Slots from the sequence's seq_len on are 0. Slots before the window of the sequence's first new token
        are 0, too, as their pages may have been reused.
        """
        block, layer = operation.block, operation.layer
        window = block.window
        cache = self._cache_rows(e, block, batch)
        kv = self._wide
        body = f"""\
  %n = linalg.index 0 : index
  %position = linalg.index 1 : index
  %d = linalg.index 2 : index
  %stride = arith.constant {self._stride} : index
  %page_rows = arith.constant {batch.page_rows(self._stride)} : index
  %plane = arith.constant {plane_offset(batch, layer, plane, self._stride)} : index
  %zero = arith.constant 0.0 : {kv}
  %index = arith.divui %position, %stride : index
  %slot = arith.remui %position, %stride : index
  %page.i64 = tensor.extract {batch.blocks.name}[%n, %index] : {batch.blocks.type}
  %page = arith.index_cast %page.i64 : i64 to index
  %first = arith.muli %page, %page_rows : index
  %in_page = arith.addi %plane, %slot : index
  %row = arith.addi %first, %in_page : index
{self._read(e, block, cache)}
  %seq_len = arith.index_cast %a : i64 to index
{reaches("%valid", "%position", "%b", "%seq_len", window)}
  %kept = arith.select %valid, %value, %zero : {kv}
  linalg.yield %kept : {kv}"""
        shape = (batch.rows, slots, block.kv_features)
        ins = [(batch.seq_lens, "n"), *([] if window is None else [(batch.starts, "n")])]
        return e.elementwise("nsd", ("nsd", shape, kv), ins, body)

    def _read(self, e: Emitter, block: Attention, cache: Tensor) -> str:
        """Return MLIR that sets %value to element %d of cache row %row, dequantised for a q8_0 cache."""
        if not self._is_quantised:
            return f"  %value = tensor.extract {cache.name}[%row, %d] : {cache.type}"
        scales = scales_of(e, cache)
        return f"""\
  %byte = tensor.extract {cache.name}[%row, %d] : {cache.type}
  %head_dim = arith.constant {block.head_dim} : index
  %first_scale = arith.constant {block.kv_features // SCALE_BYTES} : index
  %head = arith.divui %d, %head_dim : index
  %scale_at = arith.addi %first_scale, %head : index
  %scale = tensor.extract {scales.name}[%row, %scale_at] : {scales.type}
{dequantise("%value", "%byte", "%scale")}"""

    def _mask(self, e: Emitter, slots: Dim, window: int | None, batch: Batch) -> Tensor:
        """Return the mask added to scores, [rows, chunk, slots] f32: 0 for visible slots, -1e30 for others.

        A token attends to slots up to its position; with a `window`, only to the last `window` of these.
        """
        if window not in batch.masks:
            assert batch.chunk is not None
            body = f"""\
  %c = linalg.index 1 : index
  %slot = linalg.index 2 : index
  %zero = arith.constant 0.0 : f32
  %lowest = arith.constant -1.0e30 : f32
  %start = arith.index_cast %a : i64 to index
  %position = arith.addi %start, %c : index
{sees("%visible", "%slot", "%position", window)}
  %bias = arith.select %visible, %zero, %lowest : f32
  linalg.yield %bias : f32"""
            shape = (batch.rows, batch.chunk, slots)
            batch.masks[window] = e.elementwise("ncs", ("ncs", shape, "f32"), [(batch.starts, "n")], body)
        return batch.masks[window]
