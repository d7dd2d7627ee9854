"""The draft layer in numpy (model/draft_layer.py)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from shortfin_apps.llm.model.block import CachedTokens, Carried
from shortfin_apps.llm.model.draft_layer import EMBEDDING_NORM, HIDDEN_NORM, PROJECTION, RESULT_NORM
from shortfin_apps.llm.model.reference.forward import run_layer, weights_of
from shortfin_apps.llm.model.reference.pointwise import F32, capped, rms_norm
from shortfin_apps.llm.model.spec import ModelSpec


def hidden_before(hidden: F32) -> F32:
    """Return the hidden state of the token before each one [tokens, hidden], which is 0 for the first."""
    return np.concatenate([np.zeros_like(hidden[:1]), hidden[:-1]])


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
    embedded = weights["token_embd.weight"][tokens] * np.float32(spec.embedding_scale)
    own = weights_of(weights, len(spec.layers))
    normed, hidden, cached = run_draft_layer(spec, own, embedded, previous, past)
    return capped(normed @ weights[spec.head_weight].T, spec.logit_cap), hidden, cached


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
    arguments are those of `draft`, and of `forward`.
    """
    assert spec.draft is not None, "callers check it"
    number, eps = len(spec.layers), spec.rms_norm_eps
    parts = [rms_norm(eps, embedded, weights[EMBEDDING_NORM]), rms_norm(eps, previous, weights[HIDDEN_NORM])]
    x = np.concatenate(parts, axis=1) @ weights[PROJECTION].T
    x, cached = run_layer(spec, number, weights, x, Carried(), past, has_quantised_cache)
    assert cached is not None, "it stores keys and values"
    normed = rms_norm(eps, x, weights[RESULT_NORM])
    return normed, normed if spec.draft.keeps_normed else x, cached
