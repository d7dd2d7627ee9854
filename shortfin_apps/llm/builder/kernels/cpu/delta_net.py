"""Geometry of delta_net.mlir.j2."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shortfin_apps.llm.builder.kernels.interface import Interface, buffer
from shortfin_apps.llm.builder.weights.layout import LANES
from shortfin_apps.llm.model.delta_net import DeltaNet


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetGeometry:
    """The gated delta net `net` of one of `layers` layers.

    A page has `stride` tokens and is f32, whatever the type of the KV cache. The result is `dtype`.
    `has_followers`: rows may continue the rows before them.
    """

    net: DeltaNet
    layers: int
    stride: int
    eps: float  # epsilon of the result's norm
    dtype: str
    has_followers: bool = False

    @property
    def parts(self) -> dict[str, tuple[int, int]]:
        """The (offset, elements) of q, k and v in the channels of a head."""
        key, value = self.net.key_dim, self.net.value_dim
        return {"q": (0, key), "k": (key, key), "v": (2 * key, value)}

    @property
    def head_elements(self) -> int:
        """Elements of a head's state: past inputs [taps - 1, head channels], then S [key_dim, value_dim]."""
        return self.net.state_elements // self.net.value_heads

    @property
    def copied(self) -> int:
        """Elements of a state that are copied at once, as a vector."""
        return math.gcd(self.head_elements, LANES)

    @property
    def interface(self) -> Interface:
        net = self.net
        names = ("offsets", "starts", "seq_lens", *(("followers",) if self.has_followers else ()))
        rows = {name: buffer("i64", "rows") for name in names}
        return Interface(
            constants=("tokens", "rows", "width", "pages", "layer"),
            reads={
                "mixed": buffer("f32", "tokens", net.channels + net.value_features),
                "rates": buffer("f32", "tokens", 2 * net.value_heads),
                "conv": buffer("f32", net.taps, net.channels),
                "steps": buffer("f32", 2 * net.value_heads),
                "norm": buffer("f32", net.value_dim),
                **rows,
                "blocks": buffer("i64", "rows", "width"),
            },
            writes={
                "cache": buffer("f32", "pages", self.layers * net.state_elements),
                "out": buffer(self.dtype, "tokens", net.value_features),
            },
        )
