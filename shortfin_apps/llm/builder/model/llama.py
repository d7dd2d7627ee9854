"""The Llama family: Llama 2 and 3, SmolLM2, TinyLlama, Mistral."""

from __future__ import annotations

from collections.abc import Iterator

from shortfin_apps.llm.builder.model.operations import (
    Attend,
    Embed,
    GatedLinear,
    LastTokens,
    Linear,
    ModelTensor,
    Norm,
    Operation,
)
from shortfin_apps.llm.builder.model.spec import ModelSpec


def tensors(spec: ModelSpec) -> Iterator[ModelTensor]:
    """Every tensor `[out_features, in_features]`, in the order in which an invocation reads them."""
    hidden, ffn = spec.hidden_size, spec.intermediate_size
    queries = spec.num_attention_heads * spec.head_dim
    keys = spec.num_key_value_heads * spec.head_dim
    layer = (
        ("attn_norm", (hidden,), "attn_norm"),
        ("attn_q", (queries, hidden), "attn_qkv"),
        ("attn_k", (keys, hidden), "attn_qkv"),
        ("attn_v", (keys, hidden), "attn_qkv"),
        ("attn_output", (hidden, queries), "attn_output"),
        ("ffn_norm", (hidden,), "ffn_norm"),
        ("ffn_gate", (ffn, hidden), "ffn_gate_up"),
        ("ffn_up", (ffn, hidden), "ffn_gate_up"),
        ("ffn_down", (hidden, ffn), "ffn_down"),
    )
    yield _whole("token_embd.weight", (spec.vocab_size, hidden))
    for number in range(spec.num_hidden_layers):
        for name, shape, weight in layer:
            yield ModelTensor(f"blk.{number}.{name}.weight", shape, f"blk.{number}.{weight}.weight")
    yield _whole("output_norm.weight", (hidden,))
    if not spec.tie_word_embeddings:
        yield _whole("output.weight", (spec.vocab_size, hidden))


def operations(spec: ModelSpec) -> Iterator[Operation]:
    """Token ids `tokens` [tokens] i64 -> `logits` [rows, vocab] f32 of each row's last valid token."""
    yield Embed("tokens", "x", "token_embd.weight")
    for number in range(spec.num_hidden_layers):
        block = f"blk.{number}."
        yield Norm("x", "normed", f"{block}attn_norm.weight")
        yield Linear("normed", "qkv", f"{block}attn_qkv.weight")
        yield Attend("qkv", "attended", number)
        yield Linear("attended", "sum", f"{block}attn_output.weight", residual="x")
        yield Norm("sum", "normed", f"{block}ffn_norm.weight")
        yield GatedLinear("normed", "gated", f"{block}ffn_gate_up.weight")
        yield Linear("gated", "x", f"{block}ffn_down.weight", residual="sum")
    yield LastTokens("x", "x")
    yield Norm("x", "normed", "output_norm.weight")
    yield Linear("normed", "logits", spec.head_weight)


def _whole(name: str, shape: tuple[int, ...]) -> ModelTensor:
    return ModelTensor(name, shape, name)
