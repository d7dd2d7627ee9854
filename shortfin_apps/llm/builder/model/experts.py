"""Feed-forwards of routed experts: of many small ones, each token has a few that its router chooses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """The experts of a layer, each a gated feed-forward of `features` elements between its projections.

    Of the softmax over all `count` logits of the router, a token takes the `per_token` largest, of equal
    ones those of lower index; they are made to add up to 1 if `is_normalised`. With `has_biases` the
    router and every projection of an expert have one. `dense_layers` have one feed-forward for all tokens
    instead, of the spec's `intermediate_size`. With `shared`, all tokens also have an expert of so many
    features, times the sigmoid of a gate, a scalar for each token.
    """

    count: int
    per_token: int
    features: int
    is_normalised: bool = True
    has_biases: bool = False
    dense_layers: tuple[int, ...] = ()
    shared: int | None = None
