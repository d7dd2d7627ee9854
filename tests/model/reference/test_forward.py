from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shortfin_apps.llm.model.kv_layout import KeysValues
from shortfin_apps.llm.model.reference.forward import begin, forward, run_layer, weights_of
from shortfin_apps.llm.model.spec import ModelSpec
from tests.builder.compiled_model import OTHERS, ROUTED, TINY, random_weights

SPECS = {"tiny": TINY, "routed": ROUTED, **OTHERS}


@pytest.mark.parametrize("name", SPECS)
@given(length=st.integers(2, 40), split=st.floats(0, 1), quantised=st.booleans())
def test_what_layers_add_to_the_cache_is_the_past_of_later_tokens(
    name: str, length: int, split: float, quantised: bool
) -> None:
    spec: ModelSpec = replace(SPECS[name], vocab_size=64)
    weights = random_weights(spec)
    tokens = np.random.default_rng(length).integers(0, spec.vocab_size, length)
    first = min(length - 1, max(1, round(split * length)))
    x, carried = begin(spec, weights, lambda table: weights[table][tokens[:first]])
    past = []
    for layer, (block, *_) in enumerate(spec.layers):
        its = weights_of(weights, layer)
        x, kept = run_layer(spec, layer, its, x, carried, has_quantised_cache=quantised)
        if block.kv_layout is None:
            assert kept is None
            past.append(np.zeros(0, np.float32))  # which nothing reads
            continue
        assert kept is not None
        assert isinstance(block.kv_layout, KeysValues)
        heads = block.kv_layout.kv_heads, block.kv_layout.head_dim
        assert kept.keys.shape == kept.values.shape == (first, *heads)
        past.append(np.stack([kept.keys, kept.values]))
    later = forward(spec, weights, tokens[first:], past, quantised)
    whole = forward(spec, weights, tokens, has_quantised_cache=quantised)
    np.testing.assert_allclose(later, whole[first:], atol=2e-2 if quantised else 1e-4)
