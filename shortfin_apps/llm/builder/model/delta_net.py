"""Gated delta nets: layers that keep a state of fixed size in place of keys and values (arXiv:2412.06464)."""

from __future__ import annotations

from dataclasses import dataclass

# Pages of states are those of a window of so many tokens: a token reads the state behind the one before it.
STATE_WINDOW = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """The layers of a model that are gated delta nets, and the sizes of their heads.

    A value head has a state S [key_dim, value_dim] f32. With the decay g and the rate b of a token, both
    scalars of a head, and its q, k [key_dim] and v [value_dim]:

        S = exp(g) S;  S += k (b (v - k S));  o = q S

    q, k and v come from a causal convolution along the tokens, of `taps` inputs for each channel. Value heads
    share key heads: consecutive ones, or, if they are `tiled`, every `key_heads`th. A source may have the
    projections of q, k, v and gates as one tensor (`has_fused_inputs`), and those of b and a
    (`has_fused_rates`), key head by key head.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4
    tiled: bool = False
    has_fused_inputs: bool = False
    has_fused_rates: bool = False

    @property
    def key_features(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_features(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: q, k and v of all heads."""
        return 2 * self.key_features + self.value_features

    @property
    def head_channels(self) -> int:
        """Those of them that a value head reads."""
        return 2 * self.key_dim + self.value_dim

    @property
    def past_elements(self) -> int:
        """What a value head keeps of the convolution's past inputs."""
        return (self.taps - 1) * self.head_channels

    @property
    def state_elements(self) -> int:
        """f32 of a layer's state. Each value head has its own past inputs of the key head that it shares."""
        return self.value_heads * (self.past_elements + self.key_dim * self.value_dim)

    @property
    def block_elements(self) -> int:
        """Elements of a head's S with both of its sizes rounded up to a power of two."""
        return 1 << ((self.key_dim - 1).bit_length() + (self.value_dim - 1).bit_length())
