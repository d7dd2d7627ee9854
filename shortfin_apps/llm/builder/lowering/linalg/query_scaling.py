"""The scaling of q by a factor of each token's position."""

from __future__ import annotations

from shortfin_apps.llm.builder.graph.batch import Batch
from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.graph.token_layout import token_positions, token_rows
from shortfin_apps.llm.builder.lowering.linalg.bodies import yield_as
from shortfin_apps.llm.model.attention import QueryScaling, ScaleQueries


def scale_queries(e: Emitter, operation: ScaleQueries, x: Tensor, batch: Batch) -> Tensor:
    """Scale the first `operation.features` columns of x [tokens, any], which starts with q."""
    wide = "%a" if x.dtype == "f32" else "%wide"
    body = f"""\
  %d = linalg.index 1 : index
  %queries = arith.constant {operation.features} : index
  %is_query = arith.cmpi ult, %d, %queries : index
{"" if wide == "%a" else f"  %wide = arith.extf %a : {x.dtype} to f32"}
  %scaled = arith.mulf {wide}, %b : f32
  %y = arith.select %is_query, %scaled, {wide} : f32
{yield_as("%y", x.dtype)}"""
    factors = _factors(e, operation.scaling, batch)
    return e.elementwise("td", ("td", x.shape, x.dtype), [(x, "td"), (factors, "t")], body)


def _factors(e: Emitter, scaling: QueryScaling, batch: Batch) -> Tensor:
    """Return each token's factor, [tokens] f32, computed once for all layers."""
    if scaling not in batch.query_factors:
        body = f"""\
  %period = arith.constant {scaling.period} : i64
  %periods.i64 = arith.divui %a, %period : i64
  %periods = arith.uitofp %periods.i64 : i64 to f32
  %one = arith.constant 1.0 : f32
  %beta = arith.constant {scaling.beta:.9e} : f32
  %more = arith.addf %periods, %one : f32
  %log = math.log %more : f32
  %growth = arith.mulf %beta, %log : f32
  %factor = arith.addf %growth, %one : f32
  linalg.yield %factor : f32"""
        shape = (batch.tokens,)
        positions = _positions(e, batch)
        batch.query_factors[scaling] = e.elementwise("t", ("t", shape, "f32"), [(positions, "t")], body)
    return batch.query_factors[scaling]


def _positions(e: Emitter, batch: Batch) -> Tensor:
    """Emit each token's position, [tokens] i64, which the preparation for GPUs leaves out."""
    if batch.is_decode:
        return batch.starts
    rows = token_rows(e, batch.offsets, batch.tokens)
    return token_positions(e, rows, batch.offsets, batch.starts)
