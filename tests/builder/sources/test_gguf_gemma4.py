"""GGUF files of Gemma 4: sizes that differ by layer, and tensors that no layer reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from shortfin_apps.llm.builder.sources.gguf_file import GgufSource
from shortfin_apps.llm.builder.sources.gguf_gemma4 import gemma4_fields
from shortfin_apps.llm.builder.sources.hf_directory import HfDirectorySource
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.reference.forward import forward
from tests.builder.golden_families import POSITIONS, PROMPT, GoldenFamily, stored_weights

WINDOWS = [True, False, True, False]
KEYS: dict[str, Any] = {
    "block_count": 4,
    "attention.sliding_window_pattern": WINDOWS,
    "attention.head_count_kv": [2, 1, 2, 1],
    "attention.key_length": 512,
    "attention.key_length_swa": 256,
    "attention.shared_kv_layers": 1,
    "feed_forward_length": [64, 64, 64, 128],
}


@pytest.mark.parametrize("name", ["gemma4", "gemma4-e", "gemma4-unified"])
def test_a_file_has_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    family = GoldenFamily.of(name)
    source = GgufSource(family.write_gguf(tmp_path / "model.gguf"))
    logits = forward(source.spec, stored_weights(source), PROMPT)[np.array(POSITIONS) - 1]
    np.testing.assert_allclose(logits, family.logits, rtol=1e-4, atol=1e-4 * np.abs(family.logits).max())


def test_layers_of_a_kind_have_their_own_heads_and_the_last_ones_may_be_wide() -> None:
    fields = gemma4_fields("x", KEYS, {"blk.1.attn_v.weight": (1, 1)})
    assert (fields["head_dim"], fields["global_head_dim"]) == (256, 512)
    assert (fields["num_key_value_heads"], fields["num_global_key_value_heads"]) == (2, 1)
    assert (fields["intermediate_size"], fields["use_double_wide_mlp"]) == (64, True)
    assert not fields["attention_k_eq_v"]
    assert gemma4_fields("x", KEYS, {})["attention_k_eq_v"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention.sliding_window_pattern": [True]}, "sliding_window_pattern` has no item for each layer"),
        ({"attention.sliding_window_pattern": 6}, "sliding_window_pattern` has no item for each layer"),
        ({"attention.head_count_kv": [2, 1]}, "head_count_kv` has no item for each layer"),
        ({"attention.head_count_kv": [2, 1, 1, 1]}, "layers of a kind differ in `attention.head_count_kv`"),
        ({"feed_forward_length": [64, 128, 64, 128]}, "layers differ in `feed_forward_length`"),
    ],
)
def test_other_shapes_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        gemma4_fields("x", KEYS | keys, {})


def test_keys_and_values_of_layers_that_read_those_of_others_are_left_out(tmp_path: Path) -> None:
    """Published files have them."""
    family = GoldenFamily.of("gemma4-e")
    expected = stored_weights(GgufSource(family.write_gguf(tmp_path / "without.gguf")))
    last = "model.layers.5.self_attn"
    assert f"{last}.k_proj.weight" not in family.tensors
    for name in ("k_proj", "v_proj", "k_norm"):
        family.tensors[f"{last}.{name}.weight"] = family.tensors[f"model.layers.1.self_attn.{name}.weight"]
    source = GgufSource(family.write_gguf(tmp_path / "with.gguf"))
    assert stored_weights(source).keys() == expected.keys()


def test_frequencies_must_be_kept_or_dropped(tmp_path: Path) -> None:
    family = GoldenFamily.of("gemma4")
    path = family.write_gguf(tmp_path / "model.gguf")
    tensor = next(each for each in gguf.GGUFReader(path, "r+").tensors if each.name == "rope_freqs.weight")
    assert isinstance(tensor.data, np.memmap)
    tensor.data[-1] = 2.0
    tensor.data.flush()
    with pytest.raises(BuildError, match=r"`rope_freqs\.weight` that does not keep the first frequencies"):
        GgufSource(path)


def test_a_file_in_f16_has_the_weights_of_the_directory(tmp_path: Path) -> None:
    family = GoldenFamily.of("gemma4-e")
    expected = stored_weights(HfDirectorySource(family.write_hf(tmp_path / "directory")))
    path = family.write_gguf(tmp_path / "model.gguf", quantised=gguf.GGMLQuantizationType.F16)
    for name, values in stored_weights(GgufSource(path)).items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_factors_of_experts_are_apart_from_their_matrices(tmp_path: Path) -> None:
    """So these stay as stored, quantised or not."""
    family = GoldenFamily.of("gemma4-moe")
    source = GgufSource(family.write_gguf(tmp_path / "model.gguf"))
    layer = "model.layers.0"
    down, factors = (family.tensors[f"{layer}.{n}"] for n in ("experts.down_proj", "router.per_expert_scale"))
    np.testing.assert_array_equal(source.tensor("blk.0.ffn_down.2.weight"), down[2])
    np.testing.assert_array_equal(source.tensor("blk.0.ffn_down_exps.scale"), factors)
    logits = forward(source.spec, stored_weights(source), PROMPT)[np.array(POSITIONS) - 1]
    np.testing.assert_allclose(logits, family.logits, rtol=1e-4, atol=1e-4 * np.abs(family.logits).max())
