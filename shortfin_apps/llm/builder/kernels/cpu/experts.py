"""Geometry of route.mlir.j2 and sum_experts.mlir.j2."""

from __future__ import annotations

from dataclasses import dataclass

from shortfin_apps.llm.builder.kernels.interface import Interface, buffer
from shortfin_apps.llm.builder.weights.layout import LANES


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteGeometry:
    """Selection of the experts of each token (`MoE` in model/feed_forward.py).

    `count`: experts; `per_token`: experts per token. Tokens with one of the cache's first `stride` slots are
    padding. `has_places`: the results include the index of each row in the order of experts. `has_scores`:
    weights are given scores, not a softmax. `scale`: a factor of the weights.
    """

    count: int
    per_token: int
    is_normalised: bool
    stride: int
    has_places: bool = False
    has_scores: bool = False
    scale: float = 1.0

    @property
    def interface(self) -> Interface:
        each = buffer("f32", "tokens", self.count)
        return Interface(
            constants=("tokens", "rows"),
            reads={
                "logits": each,
                **({"scores": each} if self.has_scores else {}),
                "slots": buffer("i64", "tokens"),
            },
            writes={
                "weights": buffer("f32", "rows"),
                "chosen": buffer("i32", "rows"),
                "order": buffer("i32", "rows"),
                "ends": buffer("i32", self.count),
                **({"places": buffer("i32", "rows")} if self.has_places else {}),
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SumExpertsGeometry:
    """Addition of the weighted results of each token's experts to the token's residual.

    `count`: experts; `per_token`: experts per token; `size`: features. If `is_sorted`, rows of x are in the
    order of experts, and `places` has the index of each.
    """

    count: int
    per_token: int
    size: int
    is_sorted: bool = False

    @property
    def lanes(self) -> int:
        return LANES

    @property
    def interface(self) -> Interface:
        return Interface(
            constants=("tokens", "rows"),
            reads={
                "residual": buffer("f32", "tokens", self.size),
                "x": buffer("f32", "rows", self.size),
                "weights": buffer("f32", "rows"),
                "chosen": buffer("i32", "rows"),
                **({"places": buffer("i32", "rows")} if self.is_sorted else {}),
            },
            writes={"out": buffer("f32", "tokens", self.size)},
        )
