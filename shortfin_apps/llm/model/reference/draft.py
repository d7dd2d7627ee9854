"""Draft layers in numpy (model/draft_layer.py)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.model.block import CachedTokens, Carried
from shortfin_apps.llm.model.reference.forward import (
    begin,
    normed,
    reference_layer,
    run_layer,
    weights_of,
)
from shortfin_apps.llm.model.reference.pointwise import F32, capped
from shortfin_apps.llm.model.spec import ModelSpec


def hidden_before(hidden: F32) -> F32:
    """Return the hidden state of the token before each one [tokens, hidden], which is 0 for the first."""
    return np.concatenate([np.zeros_like(hidden[:1]), hidden[:-1]])


def known_hidden(spec: ModelSpec, weights: Mapping[str, F32], tokens: npt.NDArray[np.int64]) -> F32:
    """Compute what the draft layer reads of the tokens of a sequence [tokens, hidden]."""
    assert spec.draft is not None, "callers check it"
    x, carried = begin(spec, weights, lambda table: weights[table][tokens])
    streams = {}
    for layer in range(len(spec.layers)):
        x, _ = run_layer(spec, layer, weights_of(weights, layer), x, carried)
        streams[layer + 1] = x
    own = weights_of(weights, len(spec.layers))
    return spec.draft.known_hidden(own, streams, normed(spec, x, weights["output_norm.weight"]))


def draft(
    spec: ModelSpec,
    weights: Mapping[str, F32],
    tokens: npt.NDArray[np.int64],
    previous: F32,
    past: F32 | None = None,
) -> tuple[F32, F32, CachedTokens]:
    """Run the draft layer on the tokens of a sequence.

    Args:
        spec: The model.
        weights: Its weights, by name.
        tokens: Token ids [tokens].
        previous: The hidden state of the token before each one, [tokens, hidden].
        past: Keys and values of the preceding positions, [2, positions, kv_heads, head_dim].

    Returns:
        The logits [tokens, vocab], the hidden states for the next round, and the new keys and values.
    """
    assert spec.draft is not None, "callers check it"
    number = len(spec.layers)
    embedded = weights["token_embd.weight"][tokens] * np.float32(spec.embedding_scale)
    own = weights_of(weights, number)
    inputs, hidden, cached = run_draft_layer(spec, own, embedded, previous, past)
    logits = capped(inputs @ weights[spec.draft.head(number, spec.head_weight)].T, spec.logit_cap)
    return spec.draft.place(logits, own), hidden, cached


def run_draft_layer(
    spec: ModelSpec,
    weights: Mapping[str, F32],
    embedded: F32,
    previous: F32,
    past: F32 | None = None,
    has_quantised_cache: bool = False,
) -> tuple[F32, F32, CachedTokens]:
    """Return the input of the head, the hidden states for the next round, and the new keys and values.

    `weights`: by names without `blk.N.`; `embedded` [tokens, hidden]: the tokens' embeddings. The other
    arguments are as in `draft` and `forward`.
    """
    assert spec.draft is not None, "callers check it"
    its = reference_layer(spec, len(spec.layers), weights, Carried(), past, has_quantised_cache)
    inputs, hidden = spec.draft.compute(embedded, previous, its)
    assert its.cached is not None, "it stores keys and values"
    return inputs, hidden, its.cached
