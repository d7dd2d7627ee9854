"""Latent attention in numpy: the absorbed form of programs, and pages without values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shortfin_apps.llm.components.runtime.check import _check_stride
from shortfin_apps.llm.contract.config import ModelConfig
from shortfin_apps.llm.contract.errors import ArtifactError
from shortfin_apps.llm.model.block import ReferenceLayer
from shortfin_apps.llm.model.config import model_config
from shortfin_apps.llm.model.kv_layout import KVType
from shortfin_apps.llm.model.latent_attention import LatentAttention
from shortfin_apps.llm.model.reference.forward import weights_of
from shortfin_apps.llm.model.spec import BuildOptions
from tests.builder.compiled_model import LATENT, random_weights
from tests.builder.specs import changed

BLOCKS = LATENT.blocks_of(LatentAttention)


@pytest.mark.parametrize("layer", range(len(BLOCKS)))
def test_the_absorbed_form_gives_the_same_as_expanded_keys_and_values(layer: int) -> None:
    """Of the last token, with each head's matrices moved from the keys and values to q and the result."""
    block, weights = BLOCKS[layer], weights_of(random_weights(LATENT), layer)
    x = np.random.default_rng(1).standard_normal((9, LATENT.hidden_size)).astype(np.float32)
    its = ReferenceLayer(weights=weights, rms_norm_eps=1e-5, max_position_embeddings=512)
    expected = block.compute(x, its)[-1]
    assert its.cached is not None
    keys = its.cached.keys[:, 0]
    q, _ = block._projected(x, its, 0)
    expansion = weights["attn_kv_b.weight"].reshape(block.heads, -1, block.rank)
    results = []
    for head in range(block.heads):
        to_keys, to_values = np.split(expansion[head], [block.plain])
        plain, rotated = np.split(q[-1, head], [block.plain])
        scores = keys @ np.concatenate([plain @ to_keys, rotated]) * block.scale
        shares = np.exp(scores - scores.max())
        results.append(to_values @ (shares / shares.sum() @ keys[:, : block.rank]))
    np.testing.assert_allclose(np.concatenate(results) @ weights["attn_output.weight"].T, expected, atol=1e-5)


@pytest.mark.parametrize(("kv", "row"), [("bf16", 26), ("f32", 26), ("q8_0", 32)])
def test_a_page_has_one_row_for_each_token_and_layer(kv: KVType, row: int) -> None:
    """Of 20 + 6 elements, or of as many bytes with a scale and padding, for which no value is stored."""
    spec = changed(LATENT, {"rank": 22}) if kv == "q8_0" else LATENT  # whose keys have to be whole words
    config = model_config(spec, BuildOptions(device="hip:gfx942", kv=kv, block_seq_stride=16))
    assert config.page_elements == (len(spec.layers) * 16 * row,)
    assert config.token_elements == len(spec.layers) * row
    _check_stride(config)


def test_a_page_for_cpus_has_values_too() -> None:
    config = model_config(LATENT, BuildOptions(device="cpu"))
    assert config.paged_kv_cache.values_in_keys is None
    assert config.token_elements == len(LATENT.layers) * 2 * 26
    _check_stride(config)


def test_the_config_says_that_values_are_in_keys(tmp_path: Path) -> None:
    config = model_config(LATENT, BuildOptions(device="hip:gfx942"))
    assert ModelConfig.from_dict(config.to_dict()) == config
    other = config.to_dict()
    del other["paged_kv_cache"]["values_in_keys"]
    with pytest.raises(ArtifactError, match="a page has 832 elements, which are K and V of 8 tokens"):
        _check_stride(ModelConfig.from_dict(other))
    other["paged_kv_cache"]["values_in_keys"] = "odd"
    with pytest.raises(ArtifactError, match="values_in_keys` must be true or false"):
        ModelConfig.from_dict(other)
