"""Llama, and the families that differ from it by what the spec says: biases, norms of heads, the rotation."""

from __future__ import annotations

from collections.abc import Iterator

from shortfin_apps.llm.builder.model.operations import (
    AddBias,
    Attend,
    Embed,
    GatedLinear,
    LastTokens,
    Linear,
    ModelTensor,
    Norm,
    NormHeads,
    Operation,
)
from shortfin_apps.llm.builder.model.spec import ModelSpec


def tensors(spec: ModelSpec) -> Iterator[ModelTensor]:
    """Every tensor, in the order in which an invocation reads them; a matrix is [out, in]."""
    yield _whole("token_embd.weight", (spec.vocab_size, spec.hidden_size))
    for number in range(spec.num_hidden_layers):
        for name, shape, weight in _layer(spec):
            yield ModelTensor(f"blk.{number}.{name}", shape, f"blk.{number}.{weight}")
    norm = "output_norm.weight"
    yield ModelTensor(norm, (spec.hidden_size,), norm, scale=spec.logit_scale)
    if not spec.tie_word_embeddings:
        yield _whole("output.weight", (spec.vocab_size, spec.hidden_size))


def _layer(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """A layer's tensors: name, shape, and the stored weight on whose rows it is stacked."""
    hidden, ffn = spec.hidden_size, spec.intermediate_size
    queries = spec.num_attention_heads * spec.head_dim
    keys = spec.num_key_value_heads * spec.head_dim
    heads = {"attn_q": queries, "attn_k": keys, "attn_v": keys}
    yield "attn_norm.weight", (hidden,), "attn_norm.weight"
    if spec.has_fused_tensors:
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
    yield "attn_output.weight", (hidden, queries), "attn_output.weight"
    if spec.output_bias:
        yield "attn_output.bias", (hidden,), "attn_output.bias"
    yield "ffn_norm.weight", (hidden,), "ffn_norm.weight"
    if spec.has_fused_tensors:
        yield "ffn_gate_up.weight", (2 * ffn, hidden), "ffn_gate_up.weight"
    else:
        yield "ffn_gate.weight", (ffn, hidden), "ffn_gate_up.weight"
        yield "ffn_up.weight", (ffn, hidden), "ffn_gate_up.weight"
    yield "ffn_down.weight", (hidden, ffn), "ffn_down.weight"


def operations(spec: ModelSpec) -> Iterator[Operation]:
    """Token ids `tokens` [tokens] i64 -> `logits` [rows, vocab] f32 of each row's last valid token."""
    yield Embed("tokens", "x", "token_embd.weight")
    for number in range(spec.num_hidden_layers):
        yield from _attention(spec, number, f"blk.{number}.")
        yield from _feed_forward(f"blk.{number}.")
    yield LastTokens("x", "x")
    yield Norm("x", "normed", "output_norm.weight")
    yield Linear("normed", "logits", spec.head_weight)


def _attention(spec: ModelSpec, number: int, block: str) -> Iterator[Operation]:
    yield Norm("x", "normed", f"{block}attn_norm.weight")
    yield Linear("normed", "qkv", f"{block}attn_qkv.weight")
    if spec.qkv_bias:
        yield AddBias("qkv", "qkv", f"{block}attn_qkv.bias")
    if spec.qk_norm:
        yield NormHeads("qkv", "qkv", f"{block}attn_qk_norm.weight")
    yield Attend("qkv", "attended", number, is_rotated=number not in spec.unrotated_layers)
    yield Linear("attended", "sum", f"{block}attn_output.weight", residual="x")
    if spec.output_bias:
        yield AddBias("sum", "sum", f"{block}attn_output.bias")


def _feed_forward(block: str) -> Iterator[Operation]:
    yield Norm("sum", "normed", f"{block}ffn_norm.weight")
    yield GatedLinear("normed", "gated", f"{block}ffn_gate_up.weight")
    yield Linear("gated", "x", f"{block}ffn_down.weight", residual="sum")


def _whole(name: str, shape: tuple[int, ...]) -> ModelTensor:
    return ModelTensor(name, shape, name)
