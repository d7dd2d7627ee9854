"""Reference for the compiled model: the forward pass in numpy, f32 and dense."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.builder.model.delta_net import DeltaNet
from shortfin_apps.llm.builder.model.experts import RoutedExperts
from shortfin_apps.llm.builder.model.rope import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rotation,
    YarnScaling,
)
from shortfin_apps.llm.builder.model.spec import ModelSpec

F32 = npt.NDArray[np.float32]


def forward(
    spec: ModelSpec,
    weights: Mapping[str, F32],
    tokens: npt.NDArray[np.int64],
    past: F32 | None = None,
    has_quantised_cache: bool = False,
) -> F32:
    """Logits [tokens, vocab] of one sequence.

    `past` [layers, 2, positions, kv_heads, head_dim] is K and V of the positions before `tokens`, K already
    rotated; without it the sequence starts at position 0. With a quantised cache, K and V of `tokens` are
    rounded to 8 bits as `quantised_heads` does.
    """
    if past is None:
        past = np.zeros((spec.num_hidden_layers, 2, 0, spec.num_key_value_heads, spec.head_dim), np.float32)
    x = weights["token_embd.weight"][tokens] * np.float32(spec.embedding_scale)
    turns = {way: _rotary(spec, past.shape[2], len(tokens), way) for way in spec.rotations}
    for layer in range(spec.num_hidden_layers):
        block = {
            k.removeprefix(f"blk.{layer}."): w for k, w in weights.items() if k.startswith(f"blk.{layer}.")
        }
        h = _rms_norm(spec, x, block.get("attn_norm.weight"))
        if spec.delta_net is not None and spec.has_state(layer):
            assert not past.shape[2], "a state is not among keys and values"
            added = delta_net(spec, spec.delta_net, h, block) @ block["ssm_out.weight"].T
        else:
            q, k, v = _rotated_qkv(spec, _qkv(spec, h, block), *turns[spec.rotation_of(layer)])
            if has_quantised_cache:
                k, v = (dequantised_heads(*quantised_heads(x)) for x in (k, v))
            window, sinks = spec.window_of(layer), block.get("attn_sinks.weight")
            attended = _attention(spec, q, k, v, past[layer], window, sinks) * _gates(spec, h, block)
            added = attended @ block["attn_output.weight"].T + block.get("attn_output.bias", 0)
        x = x + _rms_norm(spec, added, block.get("post_attention_norm.weight"))
        h = _rms_norm(spec, x, block.get("ffn_norm.weight"))
        experts = spec.experts_of(layer)
        added = (
            _experts(spec, experts, h, block)
            if experts
            else gated(spec, h @ block["ffn_gate_up.weight"].T) @ block["ffn_down.weight"].T
        )
        x = x + _rms_norm(spec, added, block.get("post_ffw_norm.weight"))
    head = weights["token_embd.weight" if spec.tie_word_embeddings else "output.weight"]
    return _capped(_rms_norm(spec, x, weights["output_norm.weight"]) @ head.T, spec.logit_cap)


def activated(spec: ModelSpec, gate: F32) -> F32:
    active: F32 = gate / (1 + np.exp(-gate))
    if spec.activation == "gelu":
        active = 0.5 * gate * (1 + np.tanh(np.sqrt(np.float32(2 / np.pi)) * (gate + 0.044715 * gate**3)))
    return active


def gated(spec: ModelSpec, both: F32) -> F32:
    """[.., 2 * features], gate and up -> [.., features]."""
    gate, up = np.split(both, 2, axis=-1)
    if spec.activation != "clamped":
        return activated(spec, gate) * up
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    made: F32 = gate / (1 + np.exp(np.float32(-1.702) * gate)) * (up + 1)
    return made


def _capped(x: F32, cap: float | None) -> F32:
    capped: F32 = x if cap is None else np.float32(cap) * np.tanh(x / np.float32(cap))
    return capped


def _rms_norm(spec: ModelSpec, x: F32, weight: F32 | None) -> F32:
    if weight is None:
        return x
    mean = np.mean(x * x, axis=-1, keepdims=True)
    normal: F32 = x / np.sqrt(mean + np.float32(spec.rms_norm_eps)) * weight
    return normal


def _qkv(spec: ModelSpec, x: F32, block: Mapping[str, F32]) -> F32:
    """[tokens, heads, head_dim]: q, k and v before the rotation."""
    weight, queries = block["attn_qkv.weight"], spec.num_attention_heads * spec.head_dim
    if spec.attention_gate:
        weight = np.delete(weight, slice(queries, 2 * queries), axis=0)
    qkv = x @ weight.T + block.get("attn_qkv.bias", 0)
    if spec.whole_qk_norm:
        whole = block["attn_qk_norm.weight"]
        borders = [spec.num_attention_heads * spec.head_dim, len(whole)]
        q, k, v = np.split(qkv, borders, axis=1)
        q_weight, k_weight = np.split(whole, borders[:1])
        qkv = np.concatenate([_rms_norm(spec, q, q_weight), _rms_norm(spec, k, k_weight), v], axis=1)
    qkv = qkv.reshape(len(x), -1, spec.head_dim)
    if spec.qk_norm:
        heads, kv_heads = spec.num_attention_heads, spec.num_key_value_heads
        weights = np.repeat(block["attn_qk_norm.weight"].reshape(2, -1), [heads, kv_heads], axis=0)
        qkv[:, : heads + kv_heads] = _rms_norm(spec, qkv[:, : heads + kv_heads], weights)
    return qkv


def _gates(spec: ModelSpec, x: F32, block: Mapping[str, F32]) -> F32 | float:
    queries = spec.num_attention_heads * spec.head_dim
    if not spec.attention_gate:
        return 1.0
    gates: F32 = 1 / (1 + np.exp(-x @ block["attn_qkv.weight"][queries : 2 * queries].T))
    return gates


def delta_net(spec: ModelSpec, net: DeltaNet, x: F32, block: Mapping[str, F32]) -> F32:
    """[tokens, value features], from position 0 on."""
    mixed, gates = np.split(x @ block["ssm_in.weight"].T, [net.channels], axis=1)
    padded = np.concatenate([np.zeros((net.taps - 1, net.channels), np.float32), mixed])
    taps = block["ssm_conv1d.weight"].T
    convolved = sum((taps[j] * padded[j : j + len(x)] for j in range(net.taps)), np.zeros_like(mixed))
    convolved = convolved / (1 + np.exp(-convolved))
    q, k, v = np.split(convolved, [net.key_features, 2 * net.key_features], axis=1)
    q, k = (_unit(each.reshape(len(x), net.key_heads, -1)) for each in (q, k))
    repeats = net.value_heads // net.key_heads
    heads = np.tile(np.arange(net.key_heads), repeats) if net.tiled else np.arange(net.value_heads) // repeats
    rates, decays = np.split(x @ block["ssm_rates.weight"].T, 2, axis=1)
    shift, slope = np.split(block["ssm_steps.bias"], 2)
    decays = np.exp(slope * np.logaddexp(0, decays + shift))
    read = np.zeros((len(x), net.value_heads, net.value_dim), np.float32)
    state = np.zeros((net.value_heads, net.key_dim, net.value_dim), np.float32)
    for t, values in enumerate(v.reshape(read.shape)):
        state *= decays[t][:, None, None]
        error = values - np.einsum("hk,hkv->hv", k[t, heads], state)
        rate = 1 / (1 + np.exp(-rates[t]))
        state += np.einsum("hk,hv,h->hkv", k[t, heads], error, rate)
        read[t] = np.einsum("hk,hkv->hv", q[t, heads], state) / np.float32(net.key_dim**0.5)
    gates = gates.reshape(read.shape)
    gated: F32 = _rms_norm(spec, read, block["ssm_norm.weight"]) * gates / (1 + np.exp(-gates))
    return gated.reshape(len(x), -1)


def _unit(x: F32) -> F32:
    units: F32 = x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + np.float32(1e-6))
    return units


def quantised_heads(x: F32) -> tuple[npt.NDArray[np.int8], F32]:
    """x [.., head_dim] in 8 bits, and the scale [..] of each head: its largest magnitude / 127."""
    scales = np.abs(x).max(axis=-1) / np.float32(127)
    divisors = np.where(scales > 0, scales, np.float32(1))[..., None]
    return np.rint(x / divisors).astype(np.int8), scales


def dequantised_heads(quants: npt.NDArray[np.int8], scales: F32) -> F32:
    x: F32 = quants.astype(np.float32) * scales[..., None]
    return x


def _rotated_qkv(spec: ModelSpec, qkv: F32, cos: F32, sin: F32) -> tuple[F32, F32, F32]:
    heads, kv_heads = spec.num_attention_heads, spec.num_key_value_heads
    q, k, v = np.split(qkv, [heads, heads + kv_heads], axis=1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin), v


def _attention(
    spec: ModelSpec, q: F32, k: F32, v: F32, past: F32, window: int | None, sinks: F32 | None
) -> F32:
    tokens, heads, kv_heads, dim = len(q), spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
    k, v = (np.concatenate(pair) for pair in zip(past, (k, v), strict=True))
    k, v = (np.repeat(t, heads // kv_heads, axis=1) for t in (k, v))
    scores = _capped(np.einsum("qhd,khd->hqk", q, k) / np.float32(dim**0.5), spec.score_cap)
    visible = np.tri(tokens, len(k), len(k) - tokens, dtype=bool)
    if window is not None:
        visible &= ~np.tri(tokens, len(k), len(k) - tokens - window, dtype=bool)
    scores = np.where(visible, scores, -np.inf)
    peak = scores.max(axis=-1, keepdims=True)
    p = np.exp(scores - peak)
    p /= p.sum(axis=-1, keepdims=True) + (0 if sinks is None else np.exp(sinks[:, None, None] - peak))
    out: F32 = np.einsum("hqk,khd->qhd", p, v).reshape(tokens, heads * dim)
    return out


def _experts(spec: ModelSpec, experts: RoutedExperts, x: F32, block: Mapping[str, F32]) -> F32:
    chosen, weights = route(
        experts, x @ block["ffn_gate_inp.weight"].T + block.get("ffn_gate_inp.bias", np.float32(0))
    )
    gate_up, down = (_projections(block, f"ffn_{name}_exps") for name in ("gate_up", "down"))
    out = np.zeros_like(x)
    for token, its_experts in enumerate(chosen):
        for expert, weight in zip(its_experts, weights[token], strict=True):
            both = gate_up[0][expert] @ x[token] + gate_up[1][expert]
            out[token] += weight * (down[0][expert] @ gated(spec, both) + down[1][expert])
    if experts.shared:
        gates = 1 / (1 + np.exp(-x @ block["ffn_gate_inp_shexp.weight"].T))
        shared = gated(spec, x @ block["ffn_gate_up_shexp.weight"].T) @ block["ffn_down_shexp.weight"].T
        out += gates * shared
    return out


def _projections(block: Mapping[str, F32], name: str) -> tuple[F32, F32]:
    """The weights [experts, out, in] and biases [experts, out]."""
    weight = block[f"{name}.weight"]
    return weight, block.get(f"{name}.bias", np.zeros(weight.shape[:2], np.float32))


def route(experts: RoutedExperts, logits: F32) -> tuple[npt.NDArray[np.int64], F32]:
    """Each token's experts, most likely first, and their weights [tokens, experts of each]."""
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    chosen = np.argsort(-logits, axis=-1, kind="stable")[:, : experts.per_token]
    weights = np.take_along_axis(shares, chosen, axis=-1)
    return chosen, weights / weights.sum(axis=-1, keepdims=True) if experts.is_normalised else weights


def _rotate(x: F32, cos: F32, sin: F32) -> F32:
    lo, hi = np.split(x, 2, axis=-1)
    return np.concatenate([lo * cos - hi * sin, hi * cos + lo * sin], axis=-1)


def _rotary(spec: ModelSpec, start: int, tokens: int, way: Rotation) -> tuple[F32, F32]:
    """[tokens, 1, head_dim / 2] each, for programs of the longest context."""
    rotated = spec.rotated_dim or spec.head_dim
    if way is Rotation.LOCAL:
        assert spec.local_rope_theta is not None
        spec = replace(spec, rope_theta=spec.local_rope_theta, rope_scaling=None)
    frequencies = np.zeros(spec.head_dim // 2)
    frequencies[: rotated // 2] = [
        _scaled(spec, i, spec.rope_theta ** (-2 * i / rotated)) for i in range(rotated // 2)
    ]
    if way is Rotation.NONE:
        frequencies[:] = 0
    angles = np.arange(start, start + tokens)[:, None, None] * frequencies
    scaling, magnitudes = spec.rope_scaling, np.full(spec.head_dim // 2, spec.score_scale**0.5)
    if isinstance(scaling, YarnScaling | LongRopeScaling) and way is Rotation.GLOBAL:
        magnitudes[: rotated // 2] *= scaling.attention_factor
    return (magnitudes * np.cos(angles)).astype(np.float32), (magnitudes * np.sin(angles)).astype(np.float32)


def _scaled(spec: ModelSpec, index: int, frequency: float) -> float:
    """The frequency after the model's scaling, case by case as in the papers' code."""
    match spec.rope_scaling:
        case None:
            return frequency
        case LinearScaling(factor=factor):
            return frequency / factor
        case Llama3Scaling() as s:
            wavelength = 2 * np.pi / frequency
            if wavelength > s.original_max_position_embeddings / s.low_freq_factor:
                return frequency / s.factor
            if wavelength <= s.original_max_position_embeddings / s.high_freq_factor:
                return frequency
            smooth = (s.original_max_position_embeddings / wavelength - s.low_freq_factor) / (
                s.high_freq_factor - s.low_freq_factor
            )
            return (1 - smooth) * frequency / s.factor + smooth * frequency
        case LongRopeScaling() as s:
            is_long = spec.max_position_embeddings > s.original_max_position_embeddings
            return frequency / (s.long_factors if is_long else s.short_factors)[index]
        case YarnScaling() as s:
            dim = spec.rotated_dim or spec.head_dim
            low, high = (
                dim
                * np.log(s.original_max_position_embeddings / (turns * 2 * np.pi))
                / (2 * np.log(spec.rope_theta))
                for turns in (s.beta_fast, s.beta_slow)
            )
            if s.truncate:
                low, high = np.floor(low), np.ceil(high)
            low, high = max(low, 0), min(high, dim - 1)
            ramp = min(max((index - low) / (high - low), 0), 1)
            return float(frequency / s.factor * ramp + frequency * (1 - ramp))
