"""GGUF files of models with latent attention, as llama.cpp's converter writes and wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shortfin_apps.llm.builder.sources.gguf_file import GgufSource
from shortfin_apps.llm.builder.sources.gguf_latent import joined_expansion, latent_fields, with_expansions
from shortfin_apps.llm.builder.sources.hf_directory import HfDirectorySource
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.latent_attention import LatentAttention
from tests.builder.golden_families import GoldenFamily, stored_weights
from tests.builder.sources.test_families import values_of

KEYS: dict[str, Any] = {
    "attention.kv_lora_rank": 512,
    "attention.key_length": 192,
    "attention.value_length": 128,
    "rope.dimension_count": 64,
}


def v3() -> GoldenFamily:
    """With the magnitude of YaRN that all published models have: of the two factors' quotient, 1."""
    family = GoldenFamily.of("deepseek3")
    family.config["rope_parameters"]["mscale"] = family.config["rope_parameters"]["mscale_all_dim"]
    return family


def test_a_file_of_v3_is_the_same_model_as_its_directory(tmp_path: Path) -> None:
    directory = HfDirectorySource(v3().write_hf(tmp_path))
    file = GgufSource(v3().write_gguf(tmp_path / "model.gguf"))
    assert values_of(file.spec) == pytest.approx(values_of(directory.spec))
    expected = stored_weights(directory)
    for weight, values in stored_weights(file).items():
        np.testing.assert_array_equal(values, expected.pop(weight), err_msg=weight)
    assert not expected


def test_scores_of_a_file_are_scaled_for_yarn(tmp_path: Path) -> None:
    """(0.1 * 0.5 * ln(4) + 1)^2; llama.cpp's converter writes a tenth of 0.5."""
    spec = GgufSource(v3().write_gguf(tmp_path / "model.gguf")).spec
    assert [block.score_scale for block in spec.blocks_of(LatentAttention)] == [pytest.approx(1.1434340)]


def test_an_older_file_has_sizes_of_expanded_heads() -> None:
    fields = latent_fields("x", KEYS)
    newer = {"attention.key_length_mla": 192, "attention.value_length_mla": 128}
    latents = {"attention.key_length": 576, "attention.value_length": 512}
    assert latent_fields("x", KEYS | latents | newer) == fields
    sizes = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank")
    assert [fields[name] for name in sizes] == [128, 64, 128, 512, None]


def test_a_file_without_the_rank_is_refused() -> None:
    with pytest.raises(BuildError, match=r"key `deepseek2\.attention\.kv_lora_rank` is missing"):
        latent_fields("x", KEYS | {"attention.kv_lora_rank": None})


def test_both_matrices_of_each_head_are_joined() -> None:
    whole = np.arange(3 * (2 + 4) * 5).reshape(3, 6, 5)
    to_keys, to_values = np.split(whole, [2], axis=1)
    np.testing.assert_array_equal(joined_expansion(to_keys.swapaxes(1, 2), to_values), whole.reshape(-1, 5))
    shapes = {"blk.1.attn_k_b.weight": (3, 5, 2), "blk.1.attn_v_b.weight": (3, 4, 5), "other": (1,)}
    assert with_expansions(shapes) == {"blk.1.attn_kv_b.weight": (18, 5), "other": (1,)}
    older = {"blk.1.attn_kv_b.weight": (18, 5)}
    assert with_expansions(older) == older
