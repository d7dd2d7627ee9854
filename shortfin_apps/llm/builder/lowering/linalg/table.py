"""The operations that are lowered to linalg on every target, and the function that lowers each.

A new operation needs a class (in model/), and a function here that LOWERINGS lists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.linalg.bodies import capped, gated, yield_as
from shortfin_apps.llm.builder.lowering.linalg.expert_scores import (
    prefer_experts,
    scale_routing,
    score_experts,
)
from shortfin_apps.llm.builder.lowering.linalg.hidden_states import (
    hidden_before,
    join_hidden,
    keep_hidden,
    norm_hidden,
    place_logits,
)
from shortfin_apps.llm.builder.lowering.linalg.latent_attention import (
    absorb_keys,
    attend_latent,
    expand_values,
    norm_first,
)
from shortfin_apps.llm.builder.lowering.linalg.layer_inputs import (
    embed_layers,
    gate_layer_input,
    join_layer_inputs,
    join_queries,
)
from shortfin_apps.llm.builder.lowering.linalg.norms import norm_heads, norm_values, norm_whole
from shortfin_apps.llm.builder.lowering.linalg.query_scaling import scale_queries
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext, Values
from shortfin_apps.llm.model.attention import (
    DropGates,
    Gate,
    NormHeads,
    NormValues,
    NormWhole,
    ScaleQueries,
)
from shortfin_apps.llm.model.draft_layer import HiddenBefore, JoinHidden, KeepHidden, NormHidden
from shortfin_apps.llm.model.dual_experts import Zeros
from shortfin_apps.llm.model.eagle_head import PlaceLogits
from shortfin_apps.llm.model.expert_scores import PreferExperts, ScoreExperts
from shortfin_apps.llm.model.feed_forward import GateTokens, ScaleRouting
from shortfin_apps.llm.model.latent_attention import AbsorbKeys, AttendLatent, ExpandValues, NormFirst
from shortfin_apps.llm.model.layer_inputs import EmbedLayers, GateLayerInput, JoinLayerInputs
from shortfin_apps.llm.model.layer_scale import Scale
from shortfin_apps.llm.model.operations import Activate, AddBias, CapLogits, Narrow, Operation
from shortfin_apps.llm.model.shared_attention import JoinQueries


def _narrow(c: LoweringContext, e: Emitter, operation: Narrow, values: Values) -> Tensor:
    x, act = values[operation.x], c.options.activations
    return e.elementwise("td", ("td", x.shape, act), [(x, "td")], yield_as("%a", act))


def _add_bias(c: LoweringContext, e: Emitter, operation: AddBias, values: Values) -> Tensor:
    x, bias = values[operation.x], c.weights.load_one(e, operation.weight)
    add = "  %y = arith.addf %a, %b : f32\n  linalg.yield %y : f32"
    return e.elementwise("td", ("td", x.shape, "f32"), [(x, "td"), (bias, "d")], add)


def _norm_heads(c: LoweringContext, e: Emitter, operation: NormHeads, values: Values) -> Tensor:
    weight = c.weights.load_one(e, operation.weight)
    return norm_heads(e, c.spec, operation.block, values[operation.x], weight)


def _norm_whole(c: LoweringContext, e: Emitter, operation: NormWhole, values: Values) -> Tensor:
    weight = c.weights.load_one(e, operation.weight)
    return norm_whole(e, c.spec, operation.block, values[operation.x], weight)


def _norm_values(c: LoweringContext, e: Emitter, operation: NormValues, values: Values) -> Tensor:
    return norm_values(e, c.spec, operation.block, values[operation.x])


def _scale(c: LoweringContext, e: Emitter, operation: Scale, values: Values) -> Tensor:
    x, scale = values[operation.x], c.weights.load_one(e, operation.weight)
    multiply = "  %y = arith.mulf %a, %b : f32\n  linalg.yield %y : f32"
    return e.elementwise("td", ("td", x.shape, "f32"), [(x, "td"), (scale, "0")], multiply)


def _activate(c: LoweringContext, e: Emitter, operation: Activate, values: Values) -> Tensor:
    both = values[operation.x]
    assert isinstance(both.shape[1], int)
    features = both.shape[1] // 2
    gate, up = (e.columns(both, i * features, features) for i in range(2))
    return gated(e, gate, up, operation.activation, c.options.activations)


def _zeros(_: LoweringContext, e: Emitter, operation: Zeros, values: Values) -> Tensor:
    return e.fill("0.0", values[operation.x].shape, "f32")


def _scale_queries(_: LoweringContext, e: Emitter, operation: ScaleQueries, values: Values) -> Tensor:
    return scale_queries(e, operation, values[operation.x], values.batch)


def _drop_gates(_: LoweringContext, e: Emitter, operation: DropGates, values: Values) -> Tensor:
    x, block = values[operation.x], operation.block
    body = f"""\
  %t = linalg.index 0 : index
  %d = linalg.index 1 : index
  %queries = arith.constant {block.q_features} : index
  %gate_column = arith.addi %d, %queries : index
  %is_query = arith.cmpi ult, %d, %queries : index
  %column = arith.select %is_query, %d, %gate_column : index
  %value = tensor.extract {x.name}[%t, %column] : {x.type}
  linalg.yield %value : f32"""
    return e.elementwise("td", ("td", (x.shape[0], block.qkv_features), "f32"), [], body)


def _gate(c: LoweringContext, e: Emitter, operation: Gate, values: Values) -> Tensor:
    x = values[operation.x]
    queries = x.shape[1]
    assert isinstance(queries, int)
    return _times_sigmoid(c, e, x, e.columns(values[operation.gates], queries, queries), "td")


def _gate_tokens(c: LoweringContext, e: Emitter, operation: GateTokens, values: Values) -> Tensor:
    return _times_sigmoid(c, e, values[operation.x], values[operation.gates], "t0")


def _times_sigmoid(c: LoweringContext, e: Emitter, x: Tensor, gates: Tensor, at: str) -> Tensor:
    """Return `x` times the sigmoid of `gates`; `at`: the access of `gates` in the loops "td" of `x`."""
    act = c.options.activations
    wide = "" if x.dtype == "f32" else f"  %wide = arith.extf %a : {x.dtype} to f32\n"
    body = f"""\
{wide}  %one = arith.constant 1.0 : f32
  %negative = arith.negf %b : f32
  %power = math.exp %negative : f32
  %divisor = arith.addf %power, %one : f32
  %y = arith.divf {"%wide" if wide else "%a"}, %divisor : f32
{yield_as("%y", act)}"""
    return e.elementwise("td", ("td", x.shape, act), [(x, "td"), (gates, at)], body)


def _cap_logits(c: LoweringContext, e: Emitter, operation: CapLogits, values: Values) -> Tensor:
    logits, cap = values[operation.x], c.spec.logit_cap
    assert cap is not None
    body = f"{capped('%y', '%a', cap)}\n  linalg.yield %y : f32"
    return e.elementwise("rv", ("rv", logits.shape, "f32"), [(logits, "rv")], body)


LOWERINGS: dict[type[Operation], Callable[[LoweringContext, Emitter, Any, Values], Tensor]] = {
    Narrow: _narrow,
    Activate: _activate,
    AddBias: _add_bias,
    NormHeads: _norm_heads,
    NormValues: _norm_values,
    NormWhole: _norm_whole,
    Scale: _scale,
    Zeros: _zeros,
    EmbedLayers: embed_layers,
    GateLayerInput: gate_layer_input,
    JoinLayerInputs: join_layer_inputs,
    JoinQueries: join_queries,
    ScaleQueries: _scale_queries,
    DropGates: _drop_gates,
    Gate: _gate,
    GateTokens: _gate_tokens,
    CapLogits: _cap_logits,
    ScoreExperts: score_experts,
    PreferExperts: prefer_experts,
    ScaleRouting: scale_routing,
    NormFirst: norm_first,
    AbsorbKeys: absorb_keys,
    AttendLatent: attend_latent,
    ExpandValues: expand_values,
    NormHidden: norm_hidden,
    HiddenBefore: hidden_before,
    JoinHidden: join_hidden,
    KeepHidden: keep_hidden,
    PlaceLogits: place_logits,
}
