"""Gated delta nets, token by token (arXiv:2412.06464)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.model.delta_net import DeltaNet
from shortfin_apps.llm.model.reference.pointwise import rms_norm
from shortfin_apps.llm.model.spec import ModelSpec

F32 = npt.NDArray[np.float32]


def delta_net(spec: ModelSpec, net: DeltaNet, x: F32, block: Mapping[str, F32]) -> F32:
    """Compute [tokens, value features] for a sequence that starts at position 0."""
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
    gated: F32 = rms_norm(spec, read, block["ssm_norm.weight"]) * gates / (1 + np.exp(-gates))
    return gated.reshape(len(x), -1)


def _unit(x: F32) -> F32:
    units: F32 = x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + np.float32(1e-6))
    return units
