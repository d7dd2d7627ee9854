"""The forward pass, layer by layer, so that callers need only one layer's weights in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.delta_net import DeltaNet
from shortfin_apps.llm.model.feed_forward import MLP, MoE
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
        past = np.zeros((len(spec.layers), *_nothing(spec).shape), np.float32)
    x = embedded(spec, weights["token_embd.weight"][tokens])
    for layer in range(len(spec.layers)):
        x, _ = run_layer(spec, layer, weights_of(weights, layer), x, past[layer], has_quantised_cache)
    logits = normed(spec, x, weights["output_norm.weight"]) @ weights[spec.head_weight].T
    return capped(logits, spec.logit_cap)


def embedded(spec: ModelSpec, rows: F32) -> F32:
    """Scale rows [tokens, hidden] of the embedding to the first layer's input."""
    scaled: F32 = rows * np.float32(spec.embedding_scale)
    return scaled


def normed(spec: ModelSpec, x: F32, weight: F32) -> F32:
    """Norm the last layer's output for the head."""
    return rms_norm(spec, x, weight)


def weights_of(weights: Weights, layer: int) -> dict[str, F32]:
    """Return the layer's own weights, by their names without `blk.N.`."""
    prefix = f"blk.{layer}."
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def run_layer(
    spec: ModelSpec,
    layer: int,
    weights: Weights,
    x: F32,
    past: F32 | None = None,
    has_quantised_cache: bool = False,
) -> tuple[F32, KeysValues | None]:
    """Run a layer; return the residual stream [tokens, hidden] and the layer's new cache entries.

    `past` [2, positions, kv_heads, head_dim] is K and V of the preceding positions. A layer with a state has
    no cache entries and must start at position 0.
    """
    past, kept = _nothing(spec) if past is None else past, None
    for block in spec.layers[layer]:
        before, after = _NORMS[type(block)]
        h = rms_norm(spec, x, weights.get(before))
        match block:
            case Attention():
                added, kept = _attended(spec, block, weights, h, past, has_quantised_cache)
            case DeltaNet():
                assert not past.shape[1], "a state is not among keys and values"
                added = delta_net(spec, block, h, weights) @ weights["ssm_out.weight"].T
            case MoE():
                added = routed(block, h, weights)
            case MLP():
                both = h @ weights["ffn_gate_up.weight"].T
                added = gated(block.activation, both) @ weights["ffn_down.weight"].T
        x = x + rms_norm(spec, added, weights.get(after))
    return x, kept


_ATTENTION_NORMS = ("attn_norm.weight", "post_attention_norm.weight")
_FEED_FORWARD_NORMS = ("ffn_norm.weight", "post_ffw_norm.weight")
_NORMS = {
    Attention: _ATTENTION_NORMS,
    DeltaNet: _ATTENTION_NORMS,
    MLP: _FEED_FORWARD_NORMS,
    MoE: _FEED_FORWARD_NORMS,
}


def _nothing(spec: ModelSpec) -> F32:
    """Return the keys and values of no positions."""
    return np.zeros((2, 0, spec.attention.kv_heads, spec.attention.head_dim), np.float32)


def _attended(
    spec: ModelSpec, block: Attention, weights: Weights, h: F32, past: F32, has_quantised_cache: bool
) -> tuple[F32, KeysValues]:
    turns = rotary(spec, block.rotation, past.shape[1], len(h))
    q, k, v = rotated_qkv(block, projected(spec, block, h, weights), *turns)
    if has_quantised_cache:
        k, v = (dequantised_heads(*quantised_heads(each)) for each in (k, v))
    attended: F32 = attention(block, q, k, v, past, weights.get("attn_sinks.weight"))
    attended *= gates(block, h, weights)
    added: F32 = attended @ weights["attn_output.weight"].T
    return added + weights.get("attn_output.bias", np.float32(0)), KeysValues(k, v)
