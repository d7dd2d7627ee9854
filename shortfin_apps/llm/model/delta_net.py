"""Gated delta nets: layers with a state of fixed size instead of keys and values (arXiv:2412.06464)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from shortfin_apps.llm.model.block import Block, ReferenceLayer
from shortfin_apps.llm.model.kv_layout import State
from shortfin_apps.llm.model.operations import Linear, ModelTensor, Operation, PagedOperation, norm_before
from shortfin_apps.llm.model.reference.pointwise import F32, rms_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet(Block):
    """A gated delta net with a residual connection.

    Each value head has a state S [key_dim, value_dim] f32. A token has, per value head, a scalar decay g, a
    scalar rate b, and vectors q, k [key_dim] and v [value_dim]. For each token, S and the output o are:

        S = exp(g) S;  S += k (b (v - k S));  o = q S

    q, k and v are the outputs of a causal depthwise convolution along the tokens, with `taps` taps per
    channel. Several value heads share a key head: consecutive value heads, or, if `tiled`, those whose
    indices are equal modulo `key_heads`.
    `fused_inputs`: the source has one tensor for the projections of q, k, v and gates, grouped by key head;
    `fused_rates`: likewise one tensor for the projections of b and a (the decay's input).
    """

    KIND: ClassVar[str] = "gated delta nets"
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4
    tiled: bool = False
    fused_inputs: bool = False
    fused_rates: bool = False

    @property
    def key_features(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_features(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k and v of all heads."""
        return 2 * self.key_features + self.value_features

    @property
    def head_channels(self) -> int:
        """Convolution channels that one value head reads: its q, k and v."""
        return 2 * self.key_dim + self.value_dim

    @property
    def past_elements(self) -> int:
        """Past inputs of the convolution in one value head's part of the state."""
        return (self.taps - 1) * self.head_channels

    @property
    def state_elements(self) -> int:
        """f32 elements of a layer's state.

        Each value head has its own copy of the past q and k inputs, although value heads share key heads.
        """
        return self.value_heads * (self.past_elements + self.key_dim * self.value_dim)

    @property
    def block_elements(self) -> int:
        """Elements of a head's S, with each dimension of S rounded up to a power of two."""
        return 1 << ((self.key_dim - 1).bit_length() + (self.value_dim - 1).bit_length())

    @property
    def kv_layout(self) -> State:
        return State(self.state_elements)

    @property
    def vector_sizes(self) -> dict[str, int]:
        return {"size of all value heads": self.value_features}

    def tensors(self, hidden: int) -> Iterator[ModelTensor]:
        """List the tensors, by their names in the layer."""
        yield ModelTensor("attn_norm.weight", (hidden,))
        if self.fused_inputs:
            yield ModelTensor("ssm_in.weight", (self.channels + self.value_features, hidden))
        else:
            yield ModelTensor("attn_qkv.weight", (self.channels, hidden), "ssm_in.weight")
            yield ModelTensor("attn_gate.weight", (self.value_features, hidden), "ssm_in.weight")
        heads = self.value_heads
        rates = {"ssm_ba": 2 * heads} if self.fused_rates else {"ssm_beta": heads, "ssm_alpha": heads}
        for name, rows in rates.items():  # stored as floats, as errors in rates affect all later tokens
            yield ModelTensor(f"{name}.weight", (rows, hidden), "ssm_rates.weight", stored="floats")
        yield ModelTensor("ssm_conv1d.weight", (self.channels, self.taps), stored="taps")
        yield ModelTensor("ssm_dt.bias", (self.value_heads,), "ssm_steps.bias")
        yield ModelTensor("ssm_a", (self.value_heads,), "ssm_steps.bias")
        yield ModelTensor("ssm_norm.weight", (self.value_dim,))
        yield ModelTensor("ssm_out.weight", (hidden, self.value_features))

    def operations(self, layer: int, x: str, out: str) -> Iterator[Operation]:
        """List the operations that read the residual stream `x` and write the new one to `out`."""
        prefix = f"blk.{layer}."
        yield norm_before(x, f"{prefix}attn_norm.weight")
        yield Linear("normed", "mixed", f"{prefix}ssm_in.weight")
        yield Linear("normed", "rates", f"{prefix}ssm_rates.weight")
        yield DeltaRule(
            "mixed",
            "attended",
            layer,
            "rates",
            conv=f"{prefix}ssm_conv1d.weight",
            steps=f"{prefix}ssm_steps.bias",
            norm=f"{prefix}ssm_norm.weight",
        )
        yield Linear("attended", out, f"{prefix}ssm_out.weight", residual=x)

    def compute(self, x: F32, layer: ReferenceLayer) -> F32:
        assert layer.past is None or not layer.past.shape[1], "a state is not among keys and values"
        h = layer.normed(x, "attn_norm.weight")
        return self.gated_values(h, layer) @ layer.weights["ssm_out.weight"].T

    def gated_values(self, h: F32, layer: ReferenceLayer) -> F32:
        """Run the recurrence from position 0 on; return the gated head outputs [tokens, value features]."""
        weights = layer.weights
        mixed, gates = np.split(h @ weights["ssm_in.weight"].T, [self.channels], axis=1)
        padded = np.concatenate([np.zeros((self.taps - 1, self.channels), np.float32), mixed])
        taps = weights["ssm_conv1d.weight"].T
        convolved = sum((taps[j] * padded[j : j + len(h)] for j in range(self.taps)), np.zeros_like(mixed))
        convolved = convolved / (1 + np.exp(-convolved))
        q, k, v = np.split(convolved, [self.key_features, 2 * self.key_features], axis=1)
        q, k = (_unit(each.reshape(len(h), self.key_heads, -1)) for each in (q, k))
        repeats, numbers = self.value_heads // self.key_heads, np.arange(self.value_heads)
        heads = numbers % self.key_heads if self.tiled else numbers // repeats
        rates, decays = np.split(h @ weights["ssm_rates.weight"].T, 2, axis=1)
        shift, slope = np.split(weights["ssm_steps.bias"], 2)
        decays = np.exp(slope * np.logaddexp(0, decays + shift))
        read = np.zeros((len(h), self.value_heads, self.value_dim), np.float32)
        state = np.zeros((self.value_heads, self.key_dim, self.value_dim), np.float32)
        for t, values in enumerate(v.reshape(read.shape)):
            state *= decays[t][:, None, None]
            error = values - np.einsum("hk,hkv->hv", k[t, heads], state)
            rate = 1 / (1 + np.exp(-rates[t]))
            state += np.einsum("hk,hv,h->hkv", k[t, heads], error, rate)
            read[t] = np.einsum("hk,hkv->hv", q[t, heads], state) / np.float32(self.key_dim**0.5)
        gates = gates.reshape(read.shape)
        normed = rms_norm(layer.rms_norm_eps, read, weights["ssm_norm.weight"])
        gated: F32 = normed * gates / (1 + np.exp(-gates))
        return gated.reshape(len(h), -1)


def _unit(x: F32) -> F32:
    units: F32 = x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + np.float32(1e-6))
    return units


@dataclass(frozen=True, slots=True)
class DeltaRule(PagedOperation):
    """The recurrence of a gated delta net (DeltaNet), with its convolution, norm and gates.

    `x` [tokens, channels + value features] f32: the convolution's inputs, then the gates of the output.
    `rates` [tokens, 2 * value_heads] f32: b before its sigmoid, then the decay's inputs a.
    `out` [tokens, value features], in the matmuls' activation type; zeros for padding tokens.

    With (shift, slope) = the halves of `steps`: g = slope * softplus(a + shift). q and k are divided by their
    L2 norms, and q also by sqrt(key_dim). A head's output is RMSNorm(o, `norm`) * silu(gate).

    The state is stored in pages of the pool "state". The operation reads the page of the block that contains
    the preceding token. To the page of each block with new tokens, it writes the state after the last of
    these tokens.
    """

    READS: ClassVar = ("x", "rates")
    rates: str
    conv: str  # names the taps, [channels, taps]
    steps: str  # names the decay's parameters, [2 * value_heads]
    norm: str  # names the norm's weight, [value_dim]
