"""Llama, and families that the spec distinguishes: biases, norms, the rotation, windows, experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shortfin_apps.llm.model.delta_net import DeltaNet
from shortfin_apps.llm.model.experts import RoutedExperts
from shortfin_apps.llm.model.operations import (
    AddBias,
    AddNormed,
    Attend,
    CapLogits,
    DeltaRule,
    DropGates,
    Embed,
    Gate,
    GatedExperts,
    GatedLinear,
    GateTokens,
    LastTokens,
    Linear,
    ModelTensor,
    Narrow,
    Norm,
    NormHeads,
    NormWhole,
    Operation,
    Route,
    SumExperts,
)
from shortfin_apps.llm.model.spec import ModelSpec


def tensors(spec: ModelSpec) -> Iterator[ModelTensor]:
    """List every tensor in the order in which an invocation reads them; a matrix is [out, in]."""
    yield _whole("token_embd.weight", (spec.vocab_size, spec.hidden_size))
    for number in range(spec.num_hidden_layers):
        for tensor in _layer(spec, number):
            name, weight = (f"blk.{number}.{each}" for each in (tensor.name, tensor.weight))
            yield replace(tensor, name=name, weight=weight)
    norm = "output_norm.weight"
    yield ModelTensor(norm, (spec.hidden_size,), norm, scale=spec.logit_scale)
    if not spec.tie_word_embeddings:
        yield _whole("output.weight", (spec.vocab_size, spec.hidden_size))


def _layer(spec: ModelSpec, number: int) -> Iterator[ModelTensor]:
    """List a layer's tensors by their names in the layer."""
    if spec.delta_net is not None and spec.has_state(number):
        yield from (ModelTensor(*each) for each in _delta_net_tensors(spec, spec.delta_net))
    else:
        yield from (ModelTensor(*each) for each in _attention_tensors(spec))
    experts = spec.experts_of(number)
    if experts is None:
        yield from (ModelTensor(*each) for each in _dense_tensors(spec))
    else:
        yield from _expert_tensors(spec.hidden_size, experts)


def _attention_tensors(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """List name, shape, and the stored weight that stacks the tensor's rows."""
    hidden = spec.hidden_size
    queries = spec.num_attention_heads * spec.head_dim
    keys = spec.num_key_value_heads * spec.head_dim
    heads = {"attn_q": (1 + spec.attention_gate) * queries, "attn_k": keys, "attn_v": keys}
    if spec.norms_before:
        yield "attn_norm.weight", (hidden,), "attn_norm.weight"
    if spec.has_fused_qkv:
        yield "attn_qkv.weight", (spec.qkv_features, hidden), "attn_qkv.weight"
    else:
        for name, features in heads.items():
            yield f"{name}.weight", (features, hidden), "attn_qkv.weight"
    if spec.qkv_bias:
        for name, features in heads.items():
            yield f"{name}.bias", (features,), "attn_qkv.bias"
    if spec.qk_norm:
        yield "attn_q_norm.weight", (spec.head_dim,), "attn_qk_norm.weight"
        yield "attn_k_norm.weight", (spec.head_dim,), "attn_qk_norm.weight"
    if spec.whole_qk_norm:
        yield "attn_q_norm.weight", (queries,), "attn_qk_norm.weight"
        yield "attn_k_norm.weight", (keys,), "attn_qk_norm.weight"
    if spec.has_sinks:
        yield "attn_sinks.weight", (spec.num_attention_heads,), "attn_sinks.weight"
    yield "attn_output.weight", (hidden, queries), "attn_output.weight"
    if spec.output_bias:
        yield "attn_output.bias", (hidden,), "attn_output.bias"
    if spec.norms_after:
        yield "post_attention_norm.weight", (hidden,), "post_attention_norm.weight"
    if spec.norms_before:
        yield "ffn_norm.weight", (hidden,), "ffn_norm.weight"


def _delta_net_tensors(spec: ModelSpec, net: DeltaNet) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """List name, shape and stored weight, like `_attention_tensors`."""
    hidden, heads = spec.hidden_size, net.value_heads
    yield "attn_norm.weight", (hidden,), "attn_norm.weight"
    if net.has_fused_inputs:
        yield "ssm_in.weight", (net.channels + net.value_features, hidden), "ssm_in.weight"
    else:
        yield "attn_qkv.weight", (net.channels, hidden), "ssm_in.weight"
        yield "attn_gate.weight", (net.value_features, hidden), "ssm_in.weight"
    if net.has_fused_rates:
        yield "ssm_ba.weight", (2 * heads, hidden), "ssm_rates.weight"
    else:
        yield "ssm_beta.weight", (heads, hidden), "ssm_rates.weight"
        yield "ssm_alpha.weight", (heads, hidden), "ssm_rates.weight"
    yield "ssm_conv1d.weight", (net.channels, net.taps), "ssm_conv1d.weight"
    yield "ssm_dt.bias", (heads,), "ssm_steps.bias"
    yield "ssm_a", (heads,), "ssm_steps.bias"
    yield "ssm_norm.weight", (net.value_dim,), "ssm_norm.weight"
    yield "ssm_out.weight", (hidden, net.value_features), "ssm_out.weight"
    yield "ffn_norm.weight", (hidden,), "ffn_norm.weight"


def _dense_tensors(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...], str]]:
    hidden, ffn = spec.hidden_size, spec.intermediate_size
    if spec.has_fused_gate_up:
        yield "ffn_gate_up.weight", (2 * ffn, hidden), "ffn_gate_up.weight"
    else:
        yield "ffn_gate.weight", (ffn, hidden), "ffn_gate_up.weight"
        yield "ffn_up.weight", (ffn, hidden), "ffn_gate_up.weight"
    yield "ffn_down.weight", (hidden, ffn), "ffn_down.weight"
    if spec.norms_after:
        yield "post_ffw_norm.weight", (hidden,), "post_ffw_norm.weight"


def _expert_tensors(hidden: int, experts: RoutedExperts) -> Iterator[ModelTensor]:
    yield _whole("ffn_gate_inp.weight", (experts.count, hidden))
    if experts.has_biases:
        yield _whole("ffn_gate_inp.bias", (experts.count,))
    for kinds, stack, shape in (
        (("gate", "up"), "ffn_gate_up_exps", (experts.features, hidden)),
        (("down",), "ffn_down_exps", (hidden, experts.features)),
    ):
        yield from _of_experts(experts.count, kinds, f"{stack}.weight", shape)
        if experts.has_biases:
            yield from _of_experts(experts.count, kinds, f"{stack}.bias", shape[:1])
    if experts.shared:
        yield from _shared_tensors(hidden, experts.shared)


def _shared_tensors(hidden: int, features: int) -> Iterator[ModelTensor]:
    """List the tensors of the expert that all tokens use."""
    yield _whole("ffn_gate_inp_shexp.weight", (1, hidden))
    yield ModelTensor("ffn_gate_shexp.weight", (features, hidden), "ffn_gate_up_shexp.weight")
    yield ModelTensor("ffn_up_shexp.weight", (features, hidden), "ffn_gate_up_shexp.weight")
    yield _whole("ffn_down_shexp.weight", (hidden, features))


def _of_experts(
    count: int, kinds: Sequence[str], weight: str, shape: tuple[int, ...]
) -> Iterator[ModelTensor]:
    """List the tensors of every expert that are stacked into `weight`."""
    suffix = weight.rpartition(".")[2]
    for number in range(count):
        for kind in kinds:
            yield ModelTensor(f"ffn_{kind}.{number}.{suffix}", shape, weight, expert=number)


def operations(spec: ModelSpec) -> Iterator[Operation]:
    """List the operations from `tokens` [tokens] i64 to `logits` [rows, vocab] f32 of rows' last tokens."""
    yield Embed("tokens", "x", "token_embd.weight")
    for number in range(spec.num_hidden_layers):
        yield from (_delta_net if spec.has_state(number) else _attention)(spec, number, f"blk.{number}.")
        yield from (_experts if spec.experts_of(number) else _feed_forward)(spec, f"blk.{number}.")
    yield LastTokens("x", "x")
    yield Norm("x", "normed", "output_norm.weight")
    yield Linear("normed", "logits", spec.head_weight)
    if spec.logit_cap is not None:
        yield CapLogits("logits", "logits")


def _attention(spec: ModelSpec, number: int, block: str) -> Iterator[Operation]:
    yield _before(spec, "x", f"{block}attn_norm.weight")
    yield Linear("normed", "gated_qkv" if spec.attention_gate else "qkv", f"{block}attn_qkv.weight")
    if spec.attention_gate:
        yield DropGates("gated_qkv", "qkv")
    if spec.qkv_bias:
        yield AddBias("qkv", "qkv", f"{block}attn_qkv.bias")
    if spec.qk_norm:
        yield NormHeads("qkv", "qkv", f"{block}attn_qk_norm.weight")
    if spec.whole_qk_norm:
        yield NormWhole("qkv", "qkv", f"{block}attn_qk_norm.weight")
    yield Attend("qkv", "attended", number, spec.rotation_of(number))
    if spec.attention_gate:
        yield Gate("attended", "attended", "gated_qkv")
    projected, residual = ("projected", None) if spec.norms_after else ("sum", "x")
    yield Linear("attended", projected, f"{block}attn_output.weight", residual)
    if spec.output_bias:
        yield AddBias(projected, projected, f"{block}attn_output.bias")
    if spec.norms_after:
        yield AddNormed(projected, "sum", f"{block}post_attention_norm.weight", "x")


def _delta_net(spec: ModelSpec, number: int, block: str) -> Iterator[Operation]:
    assert spec.norms_before
    assert not spec.norms_after
    yield _before(spec, "x", f"{block}attn_norm.weight")
    yield Linear("normed", "mixed", f"{block}ssm_in.weight")
    yield Linear("normed", "rates", f"{block}ssm_rates.weight")
    yield DeltaRule(
        "mixed",
        "attended",
        "rates",
        number,
        conv=f"{block}ssm_conv1d.weight",
        steps=f"{block}ssm_steps.bias",
        norm=f"{block}ssm_norm.weight",
    )
    yield Linear("attended", "sum", f"{block}ssm_out.weight", residual="x")


def _feed_forward(spec: ModelSpec, block: str) -> Iterator[Operation]:
    yield _before(spec, "sum", f"{block}ffn_norm.weight")
    yield GatedLinear("normed", "gated", f"{block}ffn_gate_up.weight")
    if not spec.norms_after:
        yield Linear("gated", "x", f"{block}ffn_down.weight", residual="sum")
        return
    yield Linear("gated", "down", f"{block}ffn_down.weight")
    yield AddNormed("down", "x", f"{block}post_ffw_norm.weight", "sum")


def _before(spec: ModelSpec, x: str, weight: str) -> Operation:
    """Return the operation before a layer's matmuls: `x` to the value `normed`."""
    return Norm(x, "normed", weight) if spec.norms_before else Narrow(x, "normed")


def _experts(spec: ModelSpec, block: str) -> Iterator[Operation]:
    assert not spec.norms_after
    yield _before(spec, "sum", f"{block}ffn_norm.weight")
    if spec.experts is not None and spec.experts.shared:
        yield GatedLinear("normed", "shared", f"{block}ffn_gate_up_shexp.weight")
        yield Linear("normed", "gates", f"{block}ffn_gate_inp_shexp.weight")
        yield GateTokens("shared", "shared", "gates")
        yield Linear("shared", "sum", f"{block}ffn_down_shexp.weight", residual="sum")
    yield Linear("normed", "router", f"{block}ffn_gate_inp.weight")
    gate_up_bias = down_bias = None
    if spec.experts is not None and spec.experts.has_biases:
        yield AddBias("router", "router", f"{block}ffn_gate_inp.bias")
        gate_up_bias, down_bias = (f"{block}ffn_{name}_exps.bias" for name in ("gate_up", "down"))
    yield Route("router", "routing")
    yield GatedExperts("normed", "gated", f"{block}ffn_gate_up_exps.weight", "routing", gate_up_bias)
    yield SumExperts("gated", "x", f"{block}ffn_down_exps.weight", "routing", "sum", down_bias)


def _whole(name: str, shape: tuple[int, ...]) -> ModelTensor:
    return ModelTensor(name, shape, name)
