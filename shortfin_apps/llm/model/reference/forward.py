"""The reference forward pass; `run_layer` lets callers keep only one layer's weights in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.model.block import CachedTokens, Carried, ReferenceLayer
from shortfin_apps.llm.model.layer_inputs import TABLE
from shortfin_apps.llm.model.reference.pointwise import F32, capped, rms_norm
from shortfin_apps.llm.model.spec import ModelSpec

Weights = Mapping[str, F32]


def forward(
    spec: ModelSpec,
    weights: Weights,
    tokens: npt.NDArray[np.int64],
    past: Sequence[F32] | None = None,
    has_quantised_cache: bool = False,
) -> F32:
    """Compute the logits [tokens, vocab] of one sequence.

    `past`, of each layer [2, positions, kv_heads, head_dim]: K (after rotation) and V of the positions
    before `tokens`; None: the sequence starts at position 0. With `has_quantised_cache`, K and V of `tokens`
    are rounded to 8 bits by `quantised_heads`.
    """
    hidden = hidden_states(spec, weights, tokens, past, has_quantised_cache)
    return capped(hidden @ weights[spec.head_weight].T, spec.logit_cap)


def hidden_states(
    spec: ModelSpec,
    weights: Weights,
    tokens: npt.NDArray[np.int64],
    past: Sequence[F32] | None = None,
    has_quantised_cache: bool = False,
) -> F32:
    """Compute the input of the head [tokens, hidden]; the arguments are as in `forward`."""
    x, carried = begin(spec, weights, lambda table: weights[table][tokens])
    for layer in range(len(spec.layers)):
        before = None if past is None else past[layer]
        x, _ = run_layer(spec, layer, weights_of(weights, layer), x, carried, before, has_quantised_cache)
    return normed(spec, x, weights["output_norm.weight"])


def begin(spec: ModelSpec, weights: Weights, rows: Callable[[str], F32]) -> tuple[F32, Carried]:
    """Return the first layer's input [tokens, hidden], and what all layers read of the sequence.

    `rows` returns the tokens' rows of a table, by its name; `weights` needs the weights of layer inputs only.
    """
    x: F32 = rows("token_embd.weight") * np.float32(spec.embedding_scale)
    inputs = spec.layer_inputs
    if inputs is None:
        return x, Carried()
    return x, Carried(inputs.compute(x, rows(TABLE), weights, spec.rms_norm_eps))


def normed(spec: ModelSpec, x: F32, weight: F32) -> F32:
    """Return the RMS norm of the last layer's output `x`, the input of the head."""
    return rms_norm(spec.rms_norm_eps, x, weight)


def weights_of(weights: Weights, layer: int) -> dict[str, F32]:
    """Return the weights of a layer, by their names without `blk.N.`."""
    prefix = f"blk.{layer}."
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def run_layer(
    spec: ModelSpec,
    layer: int,
    weights: Weights,
    x: F32,
    carried: Carried,
    past: F32 | None = None,
    has_quantised_cache: bool = False,
) -> tuple[F32, CachedTokens | None]:
    """Run a layer; return the residual stream [tokens, hidden], and K and V of the new tokens.

    `past` [2, positions, kv_heads, head_dim]: K and V of the preceding positions. For a layer with a
    recurrent state, callers must start at position 0, and None is returned instead of K and V.
    """
    its = reference_layer(spec, layer, weights, carried, past, has_quantised_cache)
    for block in spec.all_layers[layer]:
        x = x + block.compute(x, its)
    return x, its.cached


def reference_layer(
    spec: ModelSpec,
    layer: int,
    weights: Weights,
    carried: Carried,
    past: F32 | None,
    has_quantised_cache: bool,
) -> ReferenceLayer:
    """Return the inputs of a layer's blocks; the arguments are as in `run_layer`."""
    return ReferenceLayer(
        number=layer,
        weights=weights,
        carried=carried,
        rms_norm_eps=spec.rms_norm_eps,
        max_position_embeddings=spec.max_position_embeddings,
        past=past,
        has_quantised_cache=has_quantised_cache,
    )
