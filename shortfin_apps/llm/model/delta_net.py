"""Gated delta nets: layers with a state of fixed size instead of keys and values (arXiv:2412.06464)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shortfin_apps.llm.model.kv_layout import State
from shortfin_apps.llm.model.operations import DeltaRule, Linear, ModelTensor, Operation, norm_before


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """A gated delta net, plus its input.

    A value head has a state S [key_dim, value_dim] f32. With a token's decay g and rate b, both scalars per
    head, and its q, k [key_dim] and v [value_dim]:

        S = exp(g) S;  S += k (b (v - k S));  o = q S

    q, k and v come from a causal convolution along the tokens, with `taps` inputs per channel. Value heads
    share key heads: consecutive ones, or, if `tiled`, every `key_heads`th. A source may fuse the projections
    of q, k, v and gates into one tensor (`fused_inputs`), and the projections of b and a (`fused_rates`), key
    head by key head.
    """

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
        """Channels that a value head reads."""
        return 2 * self.key_dim + self.value_dim

    @property
    def past_elements(self) -> int:
        """Past inputs of the convolution that a value head keeps."""
        return (self.taps - 1) * self.head_channels

    @property
    def state_elements(self) -> int:
        """f32 elements of a layer's state; value heads each keep past inputs of the key head they share."""
        return self.value_heads * (self.past_elements + self.key_dim * self.value_dim)

    @property
    def block_elements(self) -> int:
        """Elements of a head's S with both dimensions rounded up to a power of two."""
        return 1 << ((self.key_dim - 1).bit_length() + (self.value_dim - 1).bit_length())

    @property
    def kv_layout(self) -> State:
        return State(self.state_elements)

    def tensors(self, hidden: int) -> Iterator[ModelTensor]:
        """List the tensors."""
        yield ModelTensor("attn_norm.weight", (hidden,))
        if self.fused_inputs:
            yield ModelTensor("ssm_in.weight", (self.channels + self.value_features, hidden))
        else:
            yield ModelTensor("attn_qkv.weight", (self.channels, hidden), "ssm_in.weight")
            yield ModelTensor("attn_gate.weight", (self.value_features, hidden), "ssm_in.weight")
        if self.fused_rates:
            yield ModelTensor("ssm_ba.weight", (2 * self.value_heads, hidden), "ssm_rates.weight")
        else:
            yield ModelTensor("ssm_beta.weight", (self.value_heads, hidden), "ssm_rates.weight")
            yield ModelTensor("ssm_alpha.weight", (self.value_heads, hidden), "ssm_rates.weight")
        yield ModelTensor("ssm_conv1d.weight", (self.channels, self.taps))
        yield ModelTensor("ssm_dt.bias", (self.value_heads,), "ssm_steps.bias")
        yield ModelTensor("ssm_a", (self.value_heads,), "ssm_steps.bias")
        yield ModelTensor("ssm_norm.weight", (self.value_dim,))
        yield ModelTensor("ssm_out.weight", (hidden, self.value_features))

    def operations(self, layer: int, x: str, out: str) -> Iterator[Operation]:
        """List the operations from the residual stream `x` to `out`."""
        prefix = f"blk.{layer}."
        yield norm_before(x, f"{prefix}attn_norm.weight")
        yield Linear("normed", "mixed", f"{prefix}ssm_in.weight")
        yield Linear("normed", "rates", f"{prefix}ssm_rates.weight")
        yield DeltaRule(
            "mixed",
            "attended",
            "rates",
            layer,
            conv=f"{prefix}ssm_conv1d.weight",
            steps=f"{prefix}ssm_steps.bias",
            norm=f"{prefix}ssm_norm.weight",
        )
        yield Linear("attended", out, f"{prefix}ssm_out.weight", residual=x)
