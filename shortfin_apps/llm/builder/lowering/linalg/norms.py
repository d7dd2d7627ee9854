"""RMS norms in linalg: of hidden states, of each head of q and k, and of all heads of q and of k."""

from __future__ import annotations

from shortfin_apps.llm.builder.graph.emitter import Dim, Emitter, Tensor
from shortfin_apps.llm.builder.lowering.linalg.bodies import yield_as
from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.spec import ModelSpec


def rms_norm(e: Emitter, spec: ModelSpec, x: Tensor, weight: Tensor, dtype: str) -> Tensor:
    """Compute x / rms(x) * weight as `dtype`, for x [tokens, features] f32 and weight [features]."""
    sums = _sums_of_squares(e, x, "td", "t")
    body = f"""\
{_normal(spec, x.shape[1])}
  %y = arith.mulf %normal, %c : f32
{yield_as("%y", dtype)}"""
    return e.elementwise("td", ("td", x.shape, dtype), [(x, "td"), (sums, "t"), (weight, "d")], body)


def add_normed(e: Emitter, spec: ModelSpec, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """Compute residual + x / rms(x) * weight, [tokens, features] f32."""
    sums = _sums_of_squares(e, x, "td", "t")
    body = f"""\
{_normal(spec, x.shape[1])}
  %scaled = arith.mulf %normal, %c : f32
  %y = arith.addf %d, %scaled : f32
  linalg.yield %y : f32"""
    ins = [(x, "td"), (sums, "t"), (weight, "d"), (residual, "td")]
    return e.elementwise("td", ("td", x.shape, "f32"), ins, body)


def norm_heads(e: Emitter, spec: ModelSpec, block: Attention, x: Tensor, weight: Tensor) -> Tensor:
    """Return qkv [tokens, qkv features] f32 with an RMS norm of each head of q and of k.

    `weight` [2 * head_dim]: the weights for heads of q, then for heads of k.
    """
    turned = block.heads + block.kv_heads
    heads = e.reshape(x, (x.shape[0], turned + block.kv_heads, block.head_dim))
    sums = _sums_of_squares(e, heads, "thd", "th")
    # Separate inputs for q and k, as IREE 3.9 generates wrong masks for a gather from one tensor.
    both = e.reshape(weight, (1, 2 * block.head_dim))
    q_weight, k_weight = (e.columns(both, i * block.head_dim, block.head_dim) for i in range(2))
    body = f"""\
  %h = linalg.index 1 : index
  %heads = arith.constant {block.heads} : index
  %turned = arith.constant {turned} : index
  %is_query = arith.cmpi ult, %h, %heads : index
  %is_value = arith.cmpi uge, %h, %turned : index
  %weight = arith.select %is_query, %c, %d : f32
{_normal(spec, block.head_dim)}
  %scaled = arith.mulf %normal, %weight : f32
  %y = arith.select %is_value, %a, %scaled : f32
  linalg.yield %y : f32"""
    ins = [(heads, "thd"), (sums, "th"), (q_weight, "0d"), (k_weight, "0d")]
    return e.reshape(e.elementwise("thd", ("thd", heads.shape, "f32"), ins, body), x.shape)


def rms_norm_of_parts(e: Emitter, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / rms(x) * weight over the last dimension of x [tokens, parts, features] f32."""
    sums = _sums_of_squares(e, x, "tpd", "tp")
    body = f"""\
  %count = arith.constant {x.shape[2]}.0 : f32
  %mean = arith.divf %b, %count : f32
{_divide(eps)}
  %y = arith.mulf %normal, %c : f32
  linalg.yield %y : f32"""
    return e.elementwise("tpd", ("tpd", x.shape, "f32"), [(x, "tpd"), (sums, "tp"), (weight, "d")], body)


def norm_values(e: Emitter, spec: ModelSpec, block: Attention, x: Tensor) -> Tensor:
    """Return qkv [tokens, qkv features] f32 with an RMS norm of each head of v, without weights."""
    turned = block.heads + block.kv_heads
    heads = e.reshape(x, (x.shape[0], turned + block.kv_heads, block.head_dim))
    sums = _sums_of_squares(e, heads, "thd", "th")
    body = f"""\
  %h = linalg.index 1 : index
  %turned = arith.constant {turned} : index
  %is_value = arith.cmpi uge, %h, %turned : index
{_normal(spec, block.head_dim)}
  %y = arith.select %is_value, %normal, %a : f32
  linalg.yield %y : f32"""
    ins = [(heads, "thd"), (sums, "th")]
    return e.reshape(e.elementwise("thd", ("thd", heads.shape, "f32"), ins, body), x.shape)


def norm_whole(e: Emitter, spec: ModelSpec, block: Attention, x: Tensor, weight: Tensor) -> Tensor:
    """Return qkv [tokens, qkv features] f32 with an RMS norm over all of q, and one over all of k.

    `weight`: q's weights, then k's.
    """
    queries, keys = block.q_features, block.kv_features
    parts = e.columns(x, 0, queries), e.columns(x, queries, keys)
    q_sums, k_sums = (_sums_of_squares(e, part, "td", "t") for part in parts)
    body = f"""\
  %d = linalg.index 1 : index
  %queries = arith.constant {queries} : index
  %turned = arith.constant {queries + keys} : index
  %last = arith.constant {queries + keys - 1} : index
  %q_share = arith.constant {1 / queries:.9e} : f32
  %k_share = arith.constant {1 / keys:.9e} : f32
  %is_query = arith.cmpi ult, %d, %queries : index
  %is_value = arith.cmpi uge, %d, %turned : index
  %at = arith.minui %d, %last : index
  %weight = tensor.extract {weight.name}[%at] : {weight.type}
  %q_mean = arith.mulf %b, %q_share : f32
  %k_mean = arith.mulf %c, %k_share : f32
  %mean = arith.select %is_query, %q_mean, %k_mean : f32
{_divide(spec.rms_norm_eps)}
  %scaled = arith.mulf %normal, %weight : f32
  %y = arith.select %is_value, %a, %scaled : f32
  linalg.yield %y : f32"""
    ins = [(x, "td"), (q_sums, "t"), (k_sums, "t")]
    return e.elementwise("td", ("td", x.shape, "f32"), ins, body)


def _normal(spec: ModelSpec, count: Dim) -> str:
    """Return MLIR that sets %normal to %a / rms, given %b, the sum of `count` squares."""
    return f"""\
  %count = arith.constant {count}.0 : f32
  %mean = arith.divf %b, %count : f32
{_divide(spec.rms_norm_eps)}"""


def _divide(eps: float) -> str:
    """Return MLIR that sets %normal to %a / sqrt(%mean + eps)."""
    return f"""\
  %eps = arith.constant {eps:.9e} : f32
  %mean_eps = arith.addf %mean, %eps : f32
  %inverse = math.rsqrt %mean_eps : f32
  %normal = arith.mulf %a, %inverse : f32"""


def _sums_of_squares(e: Emitter, x: Tensor, loops: str, kept: str) -> Tensor:
    """Sum the squares over the last dimension of `x`.

    `loops`: a letter per dimension of `x`; `kept`: `loops` without the last letter.
    """
    add = "  %s = arith.mulf %a, %a : f32\n  %n = arith.addf %s, %out : f32\n  linalg.yield %n : f32"
    shape = x.shape[:-1]
    return e.elementwise(loops, (kept, shape, "f32"), [(x, loops)], add, e.fill("0.0", shape, "f32"))
