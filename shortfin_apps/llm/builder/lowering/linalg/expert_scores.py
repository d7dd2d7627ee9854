"""Scores and preferences of routed experts in linalg, for every target: a few numbers for each token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext, Values
from shortfin_apps.llm.model.expert_scores import ExpertScores, PreferExperts, ScoreExperts
from shortfin_apps.llm.model.feed_forward import ScaleRouting

_SIGMOID = """\
  %one = arith.constant 1.0 : f32
  %negative = arith.negf %a : f32
  %power = math.exp %negative : f32
  %divisor = arith.addf %power, %one : f32
  %y = arith.divf %one, %divisor : f32
  linalg.yield %y : f32"""
_LARGER = "  %m = arith.maximumf %a, %out : f32\n  linalg.yield %m : f32"
_POWER = "  %below = arith.subf %a, %b : f32\n  %y = math.exp %below : f32\n  linalg.yield %y : f32"
_ADD = "  %y = arith.addf %a, %b : f32\n  linalg.yield %y : f32"
_SUM = "  %y = arith.addf %a, %out : f32\n  linalg.yield %y : f32"
_SHARE = "  %y = arith.divf %a, %b : f32\n  linalg.yield %y : f32"


def score_experts(_: LoweringContext, e: Emitter, operation: ScoreExperts, values: Values) -> Tensor:
    logits = values[operation.x]
    out, tokens = ("te", logits.shape, "f32"), logits.shape[0]
    if operation.by.is_sigmoid:
        return e.elementwise("te", out, [(logits, "te")], _SIGMOID)
    lowest, zero = (e.fill(each, (tokens,), "f32") for each in ("0xFF800000", "0.0"))
    largest = e.elementwise("te", ("t", (tokens,), "f32"), [(logits, "te")], _LARGER, lowest)
    powers = e.elementwise("te", out, [(logits, "te"), (largest, "t")], _POWER)
    mass = e.elementwise("te", ("t", (tokens,), "f32"), [(powers, "te")], _SUM, zero)
    return e.elementwise("te", out, [(powers, "te"), (mass, "t")], _SHARE)


def prefer_experts(c: LoweringContext, e: Emitter, operation: PreferExperts, values: Values) -> Tensor:
    scores = values[operation.x]
    if operation.weight is not None:
        bias = c.weights.load_one(e, operation.weight)
        scores = e.elementwise("te", ("te", scores.shape, "f32"), [(scores, "te"), (bias, "e")], _ADD)
    return _in_best_groups(e, operation.by, scores) if operation.by.limits_groups else scores


def scale_routing(c: LoweringContext, e: Emitter, operation: ScaleRouting, values: Values) -> Any:
    """Return the routing of any lowering, which has `weights` f32 and `chosen` experts of the same shape."""
    routing, factors = values.operand(operation.x), c.weights.load_one(e, operation.weight)
    weights, chosen, count = routing.weights, routing.chosen, factors.shape[0]
    assert isinstance(count, int)
    body = f"""\
  %last = arith.constant {count - 1} : index
  %expert = arith.index_cast %b : {chosen.dtype} to index
  %safe = arith.minui %expert, %last : index
  %factor = tensor.extract {factors.name}[%safe] : {factors.type}
  %y = arith.mulf %a, %factor : f32
  linalg.yield %y : f32"""  # padding, with the weight 0, has an expert after the last
    loops = "tk"[: len(weights.shape)]
    ins = [(weights, loops), (chosen, loops)]
    scaled = e.elementwise(loops, (loops, weights.shape, "f32"), ins, body)
    return replace(routing, weights=scaled)


def _in_best_groups(e: Emitter, by: ExpertScores, scores: Tensor) -> Tensor:
    """Return `scores` with -inf for experts outside the best groups; on ties, the lower group is better."""
    tokens, count = scores.shape
    assert isinstance(count, int)
    grouped = e.reshape(scores, (tokens, by.groups, count // by.groups))
    places = _places(e, grouped, "tgef", ("tge", "tgf"))
    best = _sum_below(e, grouped, places, by.summed)
    ranks = _places(e, best, "tgh", ("tg", "th"))
    body = f"""\
  %kept = arith.constant {by.kept_groups} : i32
  %lowest = arith.constant 0xFF800000 : f32
  %is_kept = arith.cmpi slt, %b, %kept : i32
  %y = arith.select %is_kept, %a, %lowest : f32
  linalg.yield %y : f32"""
    kept = e.elementwise("tge", ("tge", grouped.shape, "f32"), [(grouped, "tge"), (ranks, "tg")], body)
    return e.reshape(kept, scores.shape)


def _places(e: Emitter, x: Tensor, loops: str, accesses: tuple[str, str]) -> Tensor:
    """Return the place of each element among the last dimension of `x`, largest first, in i32.

    `loops`: those of `x` and one more for the elements it is compared with; `accesses`: of `x` for both.
    """
    own, other = len(loops) - 2, len(loops) - 1
    body = f"""\
  %own = linalg.index {own} : index
  %other = linalg.index {other} : index
  %is_larger = arith.cmpf ogt, %b, %a : f32
  %is_equal = arith.cmpf oeq, %b, %a : f32
  %is_first = arith.cmpi ult, %other, %own : index
  %is_tie = arith.andi %is_equal, %is_first : i1
  %precedes = arith.ori %is_larger, %is_tie : i1
  %one = arith.extui %precedes : i1 to i32
  %y = arith.addi %one, %out : i32
  linalg.yield %y : i32"""
    ins = [(x, access) for access in accesses]
    return e.elementwise(loops, (loops[:-1], x.shape, "i32"), ins, body, e.fill("0", x.shape, "i32"))


def _sum_below(e: Emitter, x: Tensor, places: Tensor, count: int) -> Tensor:
    """Sum the elements of x [tokens, groups, experts] whose places are below `count`: [tokens, groups]."""
    body = f"""\
  %count = arith.constant {count} : i32
  %zero = arith.constant 0.0 : f32
  %counts = arith.cmpi slt, %b, %count : i32
  %kept = arith.select %counts, %a, %zero : f32
  %y = arith.addf %kept, %out : f32
  linalg.yield %y : f32"""
    shape = x.shape[:-1]
    zero = e.fill("0.0", shape, "f32")
    return e.elementwise("tge", ("tg", shape, "f32"), [(x, "tge"), (places, "tge")], body, zero)
