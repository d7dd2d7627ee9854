"""The forward pass, layer by layer, so that callers need only one layer's weights in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.model.reference.attention import (
    attention,
    dequantised_heads,
    gates,
    projected,
    quantised_heads,
    rotated_qkv,
)
from shortfin_apps.llm.model.reference.delta_net import delta_net
from shortfin_apps.llm.model.reference.experts import routed
from shortfin_apps.llm.model.reference.pointwise import capped, gated, rms_norm
from shortfin_apps.llm.model.reference.rotary import rotary
from shortfin_apps.llm.model.spec import ModelSpec

F32 = npt.NDArray[np.float32]
Weights = Mapping[str, F32]


@dataclass(frozen=True, slots=True)
class KeysValues:
    """K, already rotated, and V of a layer, as in the cache: [tokens, kv_heads, head_dim]."""

    keys: F32
    values: F32


def forward(
    spec: ModelSpec,
    weights: Weights,
    tokens: npt.NDArray[np.int64],
    past: F32 | None = None,
    has_quantised_cache: bool = False,
) -> F32:
    """Compute the logits [tokens, vocab] of one sequence.

    `past` [layers, 2, positions, kv_heads, head_dim] is K and V of the positions before `tokens`, K already
    rotated; without it, the sequence starts at position 0. With a quantised cache, K and V of `tokens` are
    rounded to 8 bits, as in `quantised_heads`.
    """
    if past is None:
        past = np.zeros((spec.num_hidden_layers, 2, 0, spec.num_key_value_heads, spec.head_dim), np.float32)
    x = embedded(spec, weights["token_embd.weight"][tokens])
    for layer in range(spec.num_hidden_layers):
        x, _ = run_layer(spec, layer, block_of(weights, layer), x, past[layer], has_quantised_cache)
    logits = normed(spec, x, weights["output_norm.weight"]) @ weights[spec.head_weight].T
    return capped(logits, spec.logit_cap)


def embedded(spec: ModelSpec, rows: F32) -> F32:
    """Scale rows [tokens, hidden] of the embedding to the first layer's input."""
    scaled: F32 = rows * np.float32(spec.embedding_scale)
    return scaled


def normed(spec: ModelSpec, x: F32, weight: F32) -> F32:
    """Norm the last layer's output for the head."""
    return rms_norm(spec, x, weight)


def block_of(weights: Weights, layer: int) -> dict[str, F32]:
    """Return the layer's own weights, by their names without `blk.N.`."""
    prefix = f"blk.{layer}."
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def run_layer(
    spec: ModelSpec,
    layer: int,
    block: Weights,
    x: F32,
    past: F32 | None = None,
    has_quantised_cache: bool = False,
) -> tuple[F32, KeysValues | None]:
    """Run a layer; return the residual stream [tokens, hidden] and the layer's new cache entries.

    `past` [2, positions, kv_heads, head_dim] is K and V of the preceding positions. A layer with a state has
    no cache entries and must start at position 0.
    """
    if past is None:
        past = np.zeros((2, 0, spec.num_key_value_heads, spec.head_dim), np.float32)
    h = rms_norm(spec, x, block.get("attn_norm.weight"))
    added, kept = _mixed(spec, layer, block, h, past, has_quantised_cache)
    x = x + rms_norm(spec, added, block.get("post_attention_norm.weight"))
    h = rms_norm(spec, x, block.get("ffn_norm.weight"))
    added = _feed_forward(spec, layer, block, h)
    return x + rms_norm(spec, added, block.get("post_ffw_norm.weight")), kept


def _mixed(
    spec: ModelSpec, layer: int, block: Weights, h: F32, past: F32, has_quantised_cache: bool
) -> tuple[F32, KeysValues | None]:
    """Compute the contribution of attention, or of the state, to each token."""
    if spec.delta_net is not None and spec.has_state(layer):
        assert not past.shape[1], "a state is not among keys and values"
        return delta_net(spec, spec.delta_net, h, block) @ block["ssm_out.weight"].T, None
    turns = rotary(spec, past.shape[1], len(h), spec.rotation_of(layer))
    q, k, v = rotated_qkv(spec, projected(spec, h, block), *turns)
    if has_quantised_cache:
        k, v = (dequantised_heads(*quantised_heads(each)) for each in (k, v))
    window, sinks = spec.window_of(layer), block.get("attn_sinks.weight")
    attended: F32 = attention(spec, q, k, v, past, window, sinks)
    attended *= gates(spec, h, block)
    added: F32 = attended @ block["attn_output.weight"].T
    return added + block.get("attn_output.bias", np.float32(0)), KeysValues(k, v)


def _feed_forward(spec: ModelSpec, layer: int, block: Weights, h: F32) -> F32:
    if (experts := spec.experts_of(layer)) is not None:
        return routed(spec, experts, h, block)
    return gated(spec, h @ block["ffn_gate_up.weight"].T) @ block["ffn_down.weight"].T
