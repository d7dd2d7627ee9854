"""Feed-forwards of routed experts: a router chooses a few of many small experts for each token."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """The experts of a layer, each a gated feed-forward of `features` elements between its projections.

    A token takes the `per_token` largest of the softmax over all `count` router logits, with ties to the
    lower index; they are rescaled to add up to 1 if `is_normalised`. With `has_biases`, the router and every
    projection of an expert have a bias. `dense_layers` have one feed-forward for all tokens instead, of the
    spec's `intermediate_size`. With `shared`, all tokens also use an expert of `shared` features, times the
    sigmoid of a gate, a scalar per token.
    """

    count: int
    per_token: int
    features: int
    is_normalised: bool = True
    has_biases: bool = False
    dense_layers: tuple[int, ...] = ()
    shared: int | None = None
