"""The draft layer in numpy against vLLM's arithmetic on the tensors of a Hugging Face file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shortfin_apps.llm.builder.sources.gguf_file import GgufSource
from shortfin_apps.llm.builder.sources.hf_directory import HfDirectorySource
from shortfin_apps.llm.model.draft_layer import DraftLayer
from shortfin_apps.llm.model.reference.draft import draft, hidden_before
from shortfin_apps.llm.model.reference.forward import forward, hidden_states
from tests.builder.golden_families import PROMPT, GoldenFamily, stored_weights
from tests.golden.draft_layer import draft_logits

TOKENS = PROMPT[:21]


def test_logits_and_hidden_states_are_those_of_vllm(tmp_path: Path) -> None:
    family = GoldenFamily.of("qwen35")
    family.add_draft_layer()
    source = HfDirectorySource(family.write_hf(tmp_path))
    weights = stored_weights(source)
    previous = hidden_before(hidden_states(source.spec, weights, TOKENS))
    logits, hidden, _ = draft(source.spec, weights, TOKENS, previous)
    expected, normed = draft_logits(
        family.config, family.tensors, TOKENS.tolist(), previous.astype(np.float64)
    )
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(hidden, normed, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "like"),
    [
        *(("qwen35", 1), ("qwen35-moe", 1), ("qwen3-next", 1)),
        *(("deepseek3", 2), ("glm4-moe-lite", 2), ("glm4-moe", 2)),
    ],
)
def test_a_directory_may_have_a_draft_layer(tmp_path: Path, name: str, like: int) -> None:
    """Its tensors change nothing of the model itself."""
    family = GoldenFamily.of(name)
    without = HfDirectorySource(family.write_hf(tmp_path / "without"))
    family.add_draft_layer(like)
    source = HfDirectorySource(family.write_hf(tmp_path / "with"))
    assert without.spec.draft is None
    assert isinstance(source.spec.draft, DraftLayer)
    assert source.spec.draft.blocks == source.spec.layers[like]
    assert source.spec.draft.keeps_normed == name.startswith("qwen")
    assert source.left_out is None
    assert source.spec.pools["whole"][-1] == len(source.spec.layers)
    expected, logits = (forward(each.spec, stored_weights(each), TOKENS) for each in (without, source))
    np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize("name", ["qwen35", "qwen35-moe", "glm4-moe"])
def test_a_gguf_file_may_have_a_draft_layer(tmp_path: Path, name: str) -> None:
    """With the weights that the directory has."""
    family = GoldenFamily.of(name)
    family.add_draft_layer()
    directory = HfDirectorySource(family.write_hf(tmp_path / "directory"))
    count = family.config["num_hidden_layers"]
    keys = {"block_count": count + 1, "nextn_predict_layers": 1}
    file = GgufSource(family.write_gguf(tmp_path / "model.gguf", keys))
    assert isinstance(file.spec.draft, DraftLayer)
    assert isinstance(directory.spec.draft, DraftLayer)
    assert file.spec.draft.keeps_normed == directory.spec.draft.keeps_normed
    assert file.spec.draft.blocks == file.spec.layers[1]
    assert len(file.spec.layers) == count
    expected = stored_weights(directory)
    found = {n: each for n, each in stored_weights(file).items() if n.startswith(f"blk.{count}.")}
    assert found.keys() == {n for n in expected if n.startswith(f"blk.{count}.")}
    for weight, values in found.items():
        np.testing.assert_allclose(values, expected[weight], rtol=1e-6, err_msg=weight)


def test_further_draft_layers_are_left_out(tmp_path: Path) -> None:
    family = GoldenFamily.of("qwen35")
    family.add_draft_layer()
    first = {name: each for name, each in family.tensors.items() if name.startswith("mtp.layers.0.")}
    family.tensors.update((name.replace("layers.0", "layers.1"), each) for name, each in first.items())
    source = HfDirectorySource(family.write_hf(tmp_path))
    assert source.spec.draft is not None
    assert source.left_out is not None
    assert f"layers of a draft model ({len(first)} tensors" in source.left_out
