"""RMS norm, soft caps and activations of the feed-forward, in f32."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.model.operations import Activation

F32 = npt.NDArray[np.float32]


def activated(activation: Activation, gate: F32) -> F32:
    active: F32
    if activation == "gelu":
        active = 0.5 * gate * (1 + np.tanh(np.sqrt(np.float32(2 / np.pi)) * (gate + 0.044715 * gate**3)))
    else:
        active = gate / (1 + np.exp(-gate))
    return active


def gated(activation: Activation, both: F32) -> F32:
    """Return activation(gate) * up: [.., 2 * features] -> [.., features]; `both` has gate, then up."""
    gate, up = np.split(both, 2, axis=-1)
    if activation != "clamped":
        return activated(activation, gate) * up
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    made: F32 = gate / (1 + np.exp(np.float32(-1.702) * gate)) * (up + 1)
    return made


def capped(x: F32, cap: float | None) -> F32:
    capped: F32 = x if cap is None else np.float32(cap) * np.tanh(x / np.float32(cap))
    return capped


def rms_norm(eps: float, x: F32, weight: F32 | np.float32) -> F32:
    mean = np.mean(x * x, axis=-1, keepdims=True)
    normal: F32 = x / np.sqrt(mean + np.float32(eps)) * weight
    return normal
