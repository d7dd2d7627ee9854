"""The operations on layer inputs, and on keys and values that layers share, in linalg."""

from __future__ import annotations

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.linalg.bodies import activate, yield_as
from shortfin_apps.llm.builder.lowering.linalg.embedding import rows_of
from shortfin_apps.llm.builder.lowering.linalg.norms import rms_norm_of_parts
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext, Values
from shortfin_apps.llm.model.layer_inputs import EmbedLayers, GateLayerInput, JoinLayerInputs
from shortfin_apps.llm.model.shared_attention import JoinQueries


def embed_layers(c: LoweringContext, e: Emitter, operation: EmbedLayers, values: Values) -> Tensor:
    scale = operation.inputs.features**0.5
    return rows_of(e, c.weights, values[operation.x], operation.weight, scale)


def join_layer_inputs(c: LoweringContext, e: Emitter, operation: JoinLayerInputs, values: Values) -> Tensor:
    """Scaling `x` by 1 / sqrt(hidden) is the same as multiplying the norm's epsilon by hidden."""
    x, weight = values[operation.x], c.weights.load_one(e, operation.weight)
    eps = c.spec.rms_norm_eps * c.spec.hidden_size
    parts = (x.shape[0], operation.inputs.layers, operation.inputs.features)
    normed = e.reshape(rms_norm_of_parts(e, e.reshape(x, parts), weight, eps), x.shape)
    body = f"""\
  %sum = arith.addf %a, %b : f32
  %share = arith.constant {0.5**0.5:.9e} : f32
  %y = arith.mulf %sum, %share : f32
  linalg.yield %y : f32"""
    ins = [(normed, "td"), (values[operation.embeddings], "td")]
    return e.elementwise("td", ("td", x.shape, "f32"), ins, body)


def gate_layer_input(c: LoweringContext, e: Emitter, operation: GateLayerInput, values: Values) -> Tensor:
    block, act = operation.block, c.options.activations
    inputs = e.columns(values[operation.inputs], operation.layer * block.features, block.features)
    body = f"""\
{activate(block.activation)}
  %y = arith.mulf %active, %b : f32
{yield_as("%y", act)}"""
    x = values[operation.x]
    return e.elementwise("td", ("td", x.shape, act), [(x, "td"), (inputs, "td")], body)


def join_queries(_: LoweringContext, e: Emitter, operation: JoinQueries, values: Values) -> Tensor:
    q, kept, block = values[operation.x], values[operation.qkv], operation.block
    tokens, dim = q.shape[0], block.head_dim
    # By heads, as IREE 3.9 generates wrong masks for a gather of columns whose number is odd.
    heads = e.reshape(q, (tokens, block.heads, dim))
    all_heads = e.reshape(kept, (tokens, block.heads + 2 * block.kv_heads, dim))
    body = f"""\
  %t = linalg.index 0 : index
  %h = linalg.index 1 : index
  %d = linalg.index 2 : index
  %queries = arith.constant {block.heads} : index
  %last = arith.constant {block.heads - 1} : index
  %is_query = arith.cmpi ult, %h, %queries : index
  %head = arith.minui %h, %last : index
  %query = tensor.extract {heads.name}[%t, %head, %d] : {heads.type}
  %y = arith.select %is_query, %query, %a : f32
  linalg.yield %y : f32"""
    joined = e.elementwise("thd", ("thd", all_heads.shape, "f32"), [(all_heads, "thd")], body)
    return e.reshape(joined, kept.shape)
