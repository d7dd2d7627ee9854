"""Gated delta nets: layers with a state of fixed size instead of keys and values (arXiv:2412.06464)."""

from __future__ import annotations

from dataclasses import dataclass

# State pages are managed like the pages of a window of this many tokens: a token reads the state after the
# token before it.
STATE_WINDOW = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNet:
    """The layers of a model that are gated delta nets, and the sizes of their heads.

    A value head has a state S [key_dim, value_dim] f32. With a token's decay g and rate b, both scalars per
    head, and its q, k [key_dim] and v [value_dim]:

        S = exp(g) S;  S += k (b (v - k S));  o = q S

    q, k and v come from a causal convolution along the tokens, with `taps` inputs per channel. Value heads
    share key heads: consecutive ones, or, if `tiled`, every `key_heads`th. A source may fuse the projections
    of q, k, v and gates into one tensor (`has_fused_inputs`), and the projections of b and a
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
