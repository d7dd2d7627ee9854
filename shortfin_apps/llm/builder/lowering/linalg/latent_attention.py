"""Latent attention in linalg: its matmuls by head, and attention to one row of the cache per token."""

from __future__ import annotations

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.linalg.bodies import yield_as
from shortfin_apps.llm.builder.lowering.linalg.cache_rows import (
    cache_rows,
    last_row_of,
    plane_offset,
    seen_slots,
    write_rows,
)
from shortfin_apps.llm.builder.lowering.linalg.norms import rms_norm
from shortfin_apps.llm.builder.lowering.linalg.packed_attention import CachePlane, packed_attention
from shortfin_apps.llm.builder.lowering.linalg.quantised_rows import quantised_rows, scales_of
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext, Values
from shortfin_apps.llm.model.latent_attention import (
    AbsorbKeys,
    AttendLatent,
    ExpandValues,
    LatentAttention,
    NormFirst,
)


def norm_first(c: LoweringContext, e: Emitter, operation: NormFirst, values: Values) -> Tensor:
    x, weight = values[operation.x], c.weights.load_one(e, operation.weight)
    return rms_norm(e, c.spec, e.columns(x, 0, operation.features), weight, c.options.activations)


def absorb_keys(c: LoweringContext, e: Emitter, operation: AbsorbKeys, values: Values) -> Tensor:
    block, x = operation.block, values[operation.x]
    queries = e.part(_queries(e, block, x), 2, 0, block.plain)
    matrices = _matrices(c, e, operation.weight, block, 0, block.plain)
    out = _multiply(e, "thcn", (queries, "thn"), (matrices, "hnc"), (x.shape[0], block.heads, block.rank))
    return e.reshape(out, (x.shape[0], block.heads * block.rank))


def expand_values(c: LoweringContext, e: Emitter, operation: ExpandValues, values: Values) -> Tensor:
    block, x, act = operation.block, values[operation.x], c.options.activations
    heads = e.reshape(x, (x.shape[0], block.heads, block.rank))
    matrices = _matrices(c, e, operation.weight, block, block.plain, block.value_dim)
    shape = (x.shape[0], block.heads, block.value_dim)
    out = _multiply(e, "thvc", (heads, "thc"), (matrices, "hvc"), shape)
    flat = e.reshape(out, (x.shape[0], block.heads * block.value_dim))
    return e.elementwise("td", ("td", flat.shape, act), [(flat, "td")], yield_as("%a", act))


def attend_latent(c: LoweringContext, e: Emitter, operation: AttendLatent, values: Values) -> Tensor:
    block, batch, options = operation.block, values.batch, c.options
    q, key = queries_and_keys(c, e, operation, values)
    stride, row = options.block_seq_stride, block.kv_layout.row_elements(options.kv)
    key = e.reshape(key, (batch.tokens, block.key_dim))
    if options.kv == "q8_0":
        key = quantised_rows(e, key, 1, row)
    else:
        key = e.elementwise("td", ("td", key.shape, options.kv), [(key, "td")], yield_as("%a", options.kv))
    write_rows(e, batch, key, operation.layer, 0, stride)
    if operation.only_stores:
        return e.reshape(q, (batch.tokens, block.heads * block.key_dim))
    cache = cache_rows(e, batch, row, stride)
    scales = scales_of(e, cache) if options.kv == "q8_0" else None
    plane = CachePlane(
        cache, last_row_of(e, cache), plane_offset(batch, operation.layer, 0, stride), 1, scales
    )
    slots = seen_slots(e, batch, None, stride)
    out = packed_attention(e, q, plane, plane, slots, scale=block.scale, value_dim=block.rank)
    flat, act = e.reshape(out, (batch.tokens, block.heads * block.rank)), options.activations
    return e.elementwise("td", ("td", flat.shape, act), [(flat, "td")], yield_as("%a", act))


def queries_and_keys(
    c: LoweringContext, e: Emitter, operation: AttendLatent, values: Values
) -> tuple[Tensor, Tensor]:
    """Return q [tokens, heads, key_dim] and the keys [tokens, 1, key_dim], both rotated, in f32."""
    block, batch = operation.block, values.batch
    joint, norm = values[operation.joint], c.weights.load_one(e, operation.norm)
    first = block.joint_features - block.key_dim
    latent = rms_norm(e, c.spec, e.columns(joint, first, block.rank), norm, "f32")
    turning = e.columns(joint, first + block.rank, block.rotated)
    key = _with_rotated(e, block, latent, _heads(e, turning, 1), batch)
    turning = e.part(_queries(e, block, values[operation.x]), 2, block.plain, block.rotated)
    return _with_rotated(e, block, values[operation.absorbed], turning, batch), key


def _queries(e: Emitter, block: LatentAttention, x: Tensor) -> Tensor:
    """Return q [tokens, heads, head_dim], the first columns of `x`."""
    return _heads(e, e.columns(x, 0, block.heads * block.head_dim), block.heads)


def _heads(e: Emitter, x: Tensor, heads: int) -> Tensor:
    """Return x [tokens, heads * size] as [tokens, heads, size]."""
    tokens, features = x.shape
    assert isinstance(features, int)
    return e.reshape(x, (tokens, heads, features // heads))


def _with_rotated(
    e: Emitter, block: LatentAttention, latents: Tensor, turning: Tensor, batch: Batch
) -> Tensor:
    """Return heads of `latents` [tokens, heads * rank], then `turning` [tokens, heads, rotated], rotated.

    The result is [tokens, heads, key_dim] f32. There is no gather: if the rotated elements are no multiple of
    16, IREE 3.9 reads wrong cosines in one.
    """
    half, heads = block.rotated // 2, turning.shape[1]
    assert isinstance(heads, int)
    cos, sin = (e.part(batch.rotary, 1, which, 1) for which in range(2))
    low, high = (e.part(turning, 2, first, half) for first in (0, half))
    parts = [
        _heads(e, latents, heads),
        *(_turned(e, *each, cos, sin) for each in ((low, high, "subf"), (high, low, "addf"))),
    ]
    return e.concat(parts, 2)


def _turned(e: Emitter, own: Tensor, other: Tensor, combine: str, cos: Tensor, sin: Tensor) -> Tensor:
    """Return own * cos +- other * sin; `own` and `other` are halves of heads, [tokens, heads, half]."""
    body = f"""\
  %along = arith.mulf %a, %c : f32
  %across = arith.mulf %b, %d : f32
  %y = arith.{combine} %along, %across : f32
  linalg.yield %y : f32"""
    ins = [(own, "thd"), (other, "thd"), (cos, "t0d"), (sin, "t0d")]
    return e.elementwise("thd", ("thd", own.shape, "f32"), ins, body)


def _matrices(
    c: LoweringContext, e: Emitter, weight: str, block: LatentAttention, first: int, rows: int
) -> Tensor:
    """Return the `rows` rows from `first` on of each head's matrix, [heads, rows, rank]."""
    w = e.reshape(c.weights.load_one(e, weight), (block.heads, block.expanded_dim, block.rank))
    return e.part(w, 1, first, rows)


def _multiply(
    e: Emitter, loops: str, x: tuple[Tensor, str], w: tuple[Tensor, str], shape: tuple[int | str, ...]
) -> Tensor:
    """Multiply x by w, floats of any type; the last loop is the reduction. Returns f32 of `shape`.

    The sizes of all loops but the tokens are static, so a token's sum has the same order in every entry.
    """
    widen = [
        f"  %{wide} = arith.extf %{name} : {operand.dtype} to f32\n" if operand.dtype != "f32" else ""
        for name, wide, (operand, _) in (("a", "x", x), ("b", "w", w))
    ]
    names = ["%a" if x[0].dtype == "f32" else "%x", "%b" if w[0].dtype == "f32" else "%w"]
    body = f"""\
{"".join(widen)}  %product = arith.mulf {", ".join(names)} : f32
  %sum = arith.addf %out, %product : f32
  linalg.yield %sum : f32"""
    return e.elementwise(loops, (loops[:-1], shape, "f32"), [x, w], body, e.fill("0.0", shape, "f32"))
