"""Operations in linalg and iree_linalg_ext alone, for targets without kernels of their own.

Pages are [layers, (K, V), stride, kv_heads * head_dim] here: one row of the cache per token, layer and plane.
Attention gathers a row's pages, with zeros where the row has no token, so that what lies there (NaN included)
cannot matter.
"""

from __future__ import annotations

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Dim, Emitter, Tensor, affine_map
from shortfin_apps.llm.builder.graph.token_layout import cache_slots, last_tokens
from shortfin_apps.llm.builder.lowering.linalg.embedding import embedding
from shortfin_apps.llm.builder.lowering.linalg.packed_attention import (
    CachePlane,
    packed_attention,
    token_slots,
)
from shortfin_apps.llm.builder.lowering.linalg.sampling import advance, sample
from shortfin_apps.llm.builder.lowering.linalg.top_k import top_k
from shortfin_apps.llm.builder.lowering.lowering import LoopState
from shortfin_apps.llm.builder.model.spec import BuildOptions, ModelSpec
from shortfin_apps.llm.builder.weights.parameters import WeightTypes


class LinalgOperations:
    """Kernels of every operation, for any target; those of Linear and GatedLinear read row-major weights."""

    draws_rows = False

    def __init__(self, spec: ModelSpec, options: BuildOptions, weights: WeightTypes) -> None:
        self._spec = spec
        self._options = options
        self._weights = weights
        self._stride = options.block_seq_stride
        self._row = spec.num_key_value_heads * spec.head_dim  # elements of one row of the cache
        self._page_rows = spec.num_hidden_layers * 2 * self._stride

    def embed(self, e: Emitter, tokens: Tensor, weight: str) -> Tensor:
        return embedding(e, self._spec, self._weights, tokens, weight)

    def sample(
        self, e: Emitter, values: Tensor, indices: Tensor, logits: Tensor, state: LoopState
    ) -> tuple[Tensor, LoopState]:
        """Samples from the candidates alone; a whole row is sampled on the host."""
        token_ids = sample(e, values, indices, state.sampling, state.positions)
        tokens, positions = advance(e, token_ids, state.tokens, state.positions)
        return token_ids, LoopState(tokens, positions, state.sampling)

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
        act = self._options.activations
        sums = _sums_of_squares(e, x, "td", "t")
        scale = f"""\
{self._normal(self._spec.hidden_size)}
  %y = arith.mulf %normal, %c : f32
{yield_as("%y", act)}"""
        weights = self._weights.load_one(e, weight)
        return e.elementwise("td", ("td", x.shape, act), [(x, "td"), (sums, "t"), (weights, "d")], scale)

    def norm_heads(self, e: Emitter, x: Tensor, weight: str) -> Tensor:
        spec = self._spec
        turned = spec.num_attention_heads + spec.num_key_value_heads
        heads = e.reshape(x, (x.shape[0], turned + spec.num_key_value_heads, spec.head_dim))
        sums = _sums_of_squares(e, heads, "thd", "th")
        # Both are inputs: IREE 3.9 makes wrong masks of a gather from one by head and element.
        both = e.reshape(self._weights.load_one(e, weight), (1, 2 * spec.head_dim))
        q_weight, k_weight = (e.columns(both, i * spec.head_dim, spec.head_dim) for i in range(2))
        body = f"""\
  %h = linalg.index 1 : index
  %heads = arith.constant {spec.num_attention_heads} : index
  %turned = arith.constant {turned} : index
  %is_query = arith.cmpi ult, %h, %heads : index
  %is_value = arith.cmpi uge, %h, %turned : index
  %weight = arith.select %is_query, %c, %d : f32
{self._normal(spec.head_dim)}
  %scaled = arith.mulf %normal, %weight : f32
  %y = arith.select %is_value, %a, %scaled : f32
  linalg.yield %y : f32"""
        ins = [(heads, "thd"), (sums, "th"), (q_weight, "0d"), (k_weight, "0d")]
        return e.reshape(e.elementwise("thd", ("thd", heads.shape, "f32"), ins, body), x.shape)

    def _normal(self, count: int) -> str:
        """The part of a body that divides %a by the root mean of `count` squares, whose sum is %b."""
        return f"""\
  %count = arith.constant {count}.0 : f32
  %eps = arith.constant {self._spec.rms_norm_eps:.9e} : f32
  %mean = arith.divf %b, %count : f32
  %mean_eps = arith.addf %mean, %eps : f32
  %inverse = math.rsqrt %mean_eps : f32
  %normal = arith.mulf %a, %inverse : f32"""

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

    def add_bias(self, e: Emitter, x: Tensor, weight: str) -> Tensor:
        bias = self._weights.load_one(e, weight)
        add = "  %y = arith.addf %a, %b : f32\n  linalg.yield %y : f32"
        return e.elementwise("td", ("td", x.shape, "f32"), [(x, "td"), (bias, "d")], add)

    def gated_linear(self, e: Emitter, x: Tensor, weight: str) -> Tensor:
        both = self.linear(e, x, weight)
        act = self._options.activations
        shape = (x.shape[0], self._spec.intermediate_size)
        gate, up = (e.columns(both, i * shape[1], shape[1]) for i in range(2))
        silu = f"""\
  %one = arith.constant 1.0 : f32
  %negative = arith.negf %a : f32
  %power = math.exp %negative : f32
  %divisor = arith.addf %power, %one : f32
  %silu = arith.divf %a, %divisor : f32
  %y = arith.mulf %silu, %b : f32
{yield_as("%y", act)}"""
        return e.elementwise("td", ("td", shape, act), [(gate, "td"), (up, "td")], silu)

    def attend(self, e: Emitter, qkv: Tensor, layer: int, batch: Batch) -> Tensor:
        return self._attention(e, self._rope_store(e, qkv, layer, batch), layer, batch)

    def _rope_store(self, e: Emitter, qkv: Tensor, layer: int, batch: Batch) -> Tensor:
        heads, kv_heads = self._spec.num_attention_heads, self._spec.num_key_value_heads
        tokens, kv = batch.tokens, self._options.kv
        q = self._rotate(e, qkv, 0, heads, "f32", batch)
        k = self._rotate(e, qkv, heads, kv_heads, kv, batch)
        v_f32 = e.columns(qkv, (heads + kv_heads) * self._spec.head_dim, self._row)
        v = e.elementwise("td", ("td", v_f32.shape, kv), [(v_f32, "td")], yield_as("%a", kv))
        cache = self._cache_rows(e, batch)
        for plane, update in enumerate((k, v)):
            rows = self._token_rows(e, layer, plane, batch)
            # Padding tokens share rows of page 0: which of them is written there last does not matter.
            cache = e.tensor(
                f"iree_linalg_ext.scatter dimension_map = [0] unique_indices(true) "
                f"ins({update.name}, {rows.name} : {update.type}, {rows.type}) "
                f"outs({cache.name} : {cache.type}) {{\n^bb0(%new: {kv}, %old: {kv}):\n"
                f"  iree_linalg_ext.yield %new : {kv}\n}} -> {cache.type}",
                cache.shape,
                kv,
            )
        batch.cache = e.reshape(cache, batch.cache.shape)
        return e.reshape(q, (tokens, heads * self._spec.head_dim))

    def _attention(self, e: Emitter, q: Tensor, layer: int, batch: Batch) -> Tensor:
        s, kv = self._spec, self._options.kv
        group = s.num_attention_heads // s.num_key_value_heads
        slots = e.times(batch.width, self._stride)
        if batch.chunk is None:
            return self._packed_attention(e, q, layer, batch)
        q = e.elementwise("td", ("td", q.shape, kv), [(q, "td")], yield_as("%a", kv))
        q = e.reshape(q, (batch.rows, batch.chunk, s.num_key_value_heads, group, s.head_dim))
        kv_shape = (batch.rows, slots, s.num_key_value_heads, s.head_dim)
        k, v = (e.reshape(self._gather(e, layer, plane, slots, batch), kv_shape) for plane in range(2))
        mask = self._mask(e, slots, batch)
        scale = e.value(f"arith.constant {s.head_dim**-0.5:.9e} : {kv}")
        out = e.empty(q.shape, "f32")
        # b row, h kv head, g query head of it, c query token, n slot, k contracted, d of the result
        accesses = ("bchgk", "bnhk", "bnhd", "", "bcn", "bchgd")
        maps = ", ".join(affine_map("bhgcnkd", access) for access in accesses)
        result = e.tensor(
            # The generic form is the one that IREE 3.9 and 3.13 both parse.
            f'"iree_linalg_ext.attention"'
            f"({q.name}, {k.name}, {v.name}, {scale}, {mask.name}, {out.name}) "
            f"<{{indexing_maps = [{maps}], operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1>}}> ({{\n"
            f"^bb0(%score: f32):\n  iree_linalg_ext.yield %score : f32\n}}) : "
            f"({q.type}, {k.type}, {v.type}, {kv}, {mask.type}, {out.type}) -> {out.type}",
            q.shape,
            "f32",
        )
        return self._flat_heads(e, result, batch)

    def _packed_attention(self, e: Emitter, q: Tensor, layer: int, batch: Batch) -> Tensor:
        if batch.token_slots is None:
            batch.token_slots = token_slots(
                e, batch.blocks, batch.token_rows, batch.positions, self._stride, self._page_rows
            )
        cache = self._cache_rows(e, batch)
        last_row = e.value(f"arith.subi {e.index(cache.shape[0])}, {e.constant(1)} : index")
        keys, values = (CachePlane(cache, last_row, (layer * 2 + plane) * self._stride) for plane in range(2))
        q = e.reshape(q, (batch.tokens, self._spec.num_attention_heads, self._spec.head_dim))
        result = packed_attention(e, q, keys, values, batch.token_slots)
        return self._flat_heads(e, result, batch)

    def _flat_heads(self, e: Emitter, heads: Tensor, batch: Batch) -> Tensor:
        """f32 of any shape that holds [tokens, heads * head_dim] -> that shape, act."""
        act = self._options.activations
        flat = e.reshape(heads, (batch.tokens, self._spec.num_attention_heads * self._spec.head_dim))
        return e.elementwise("td", ("td", flat.shape, act), [(flat, "td")], yield_as("%a", act))

    def top_k(self, e: Emitter, logits: Tensor) -> tuple[Tensor, Tensor]:
        return top_k(e, logits, self._options.top_k)

    def _rotate(
        self, e: Emitter, qkv: Tensor, first_head: int, heads: int, dtype: str, batch: Batch
    ) -> Tensor:
        """[tokens, heads * head_dim] of `dtype`: the heads of qkv from `first_head` on, rotated."""
        dim = self._spec.head_dim
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

    def _cache_rows(self, e: Emitter, batch: Batch) -> Tensor:
        rows = e.times(batch.pages, self._page_rows)
        return e.reshape(batch.cache, (rows, self._row))

    def _token_rows(self, e: Emitter, layer: int, plane: int, batch: Batch) -> Tensor:
        """[tokens, 1] i64: the row of the cache that each token's K or V goes to."""
        if batch.slots is None:
            batch.slots = cache_slots(e, batch, self._stride, self._page_rows)
        body = f"""\
  %offset = arith.constant {(layer * 2 + plane) * self._stride} : i64
  %row = arith.addi %a, %offset : i64
  linalg.yield %row : i64"""
        shape = (batch.tokens, 1)
        return e.elementwise("tu", ("tu", shape, "i64"), [(batch.slots, "t")], body)

    def _gather(self, e: Emitter, layer: int, plane: int, slots: Dim, batch: Batch) -> Tensor:
        """[rows, slots, kv_heads * head_dim]: K or V of each row's slots, 0 from its seq_len on."""
        cache = self._cache_rows(e, batch)
        kv = self._options.kv
        body = f"""\
  %n = linalg.index 0 : index
  %position = linalg.index 1 : index
  %d = linalg.index 2 : index
  %stride = arith.constant {self._stride} : index
  %page_rows = arith.constant {self._page_rows} : index
  %plane = arith.constant {(layer * 2 + plane) * self._stride} : index
  %zero = arith.constant 0.0 : {kv}
  %index = arith.divui %position, %stride : index
  %slot = arith.remui %position, %stride : index
  %page.i64 = tensor.extract {batch.blocks.name}[%n, %index] : {batch.blocks.type}
  %page = arith.index_cast %page.i64 : i64 to index
  %first = arith.muli %page, %page_rows : index
  %in_page = arith.addi %plane, %slot : index
  %row = arith.addi %first, %in_page : index
  %value = tensor.extract {cache.name}[%row, %d] : {cache.type}
  %seq_len = arith.index_cast %a : i64 to index
  %valid = arith.cmpi ult, %position, %seq_len : index
  %kept = arith.select %valid, %value, %zero : {kv}
  linalg.yield %kept : {kv}"""
        shape = (batch.rows, slots, self._row)
        return e.elementwise("nsd", ("nsd", shape, kv), [(batch.seq_lens, "n")], body)

    def _mask(self, e: Emitter, slots: Dim, batch: Batch) -> Tensor:
        """[rows, chunk, slots] f32, added to the scores: 0 up to the query's position, lowest after it."""
        if batch.mask is None:
            assert batch.chunk is not None
            body = """\
  %c = linalg.index 1 : index
  %slot = linalg.index 2 : index
  %zero = arith.constant 0.0 : f32
  %lowest = arith.constant -1.0e30 : f32
  %start = arith.index_cast %a : i64 to index
  %position = arith.addi %start, %c : index
  %visible = arith.cmpi ule, %slot, %position : index
  %bias = arith.select %visible, %zero, %lowest : f32
  linalg.yield %bias : f32"""
            shape = (batch.rows, batch.chunk, slots)
            batch.mask = e.elementwise("ncs", ("ncs", shape, "f32"), [(batch.starts, "n")], body)
        return batch.mask


def _sums_of_squares(e: Emitter, x: Tensor, loops: str, kept: str) -> Tensor:
    """Over the last dimension of `x`; `loops` and `kept` name its dimensions and those of the result."""
    add = "  %s = arith.mulf %a, %a : f32\n  %n = arith.addf %s, %out : f32\n  linalg.yield %n : f32"
    shape = x.shape[:-1]
    return e.elementwise(loops, (kept, shape, "f32"), [(x, loops)], add, e.fill("0.0", shape, "f32"))


def yield_as(value: str, dtype: str) -> str:
    """The end of a body whose result is the f32 `value` narrowed to `dtype`."""
    if dtype == "f32":
        return f"  linalg.yield {value} : f32"
    return f"  %narrow = arith.truncf {value} : f32 to {dtype}\n  linalg.yield %narrow : {dtype}"
