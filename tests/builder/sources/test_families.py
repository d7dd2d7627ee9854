"""Every family from both kinds of source, against the logits of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from shortfin_apps.llm.builder.sources.gguf_file import GgufSource
from shortfin_apps.llm.builder.sources.hf_directory import HfDirectorySource
from shortfin_apps.llm.contract.errors import BuildError
from shortfin_apps.llm.model.reference.forward import forward
from shortfin_apps.llm.model.spec import ModelSpec
from tests.builder.golden_families import MODELS, POSITIONS, PROMPT, GoldenFamily, stored_weights
from tests.builder.specs import changed

# What GGUF files of a family cannot say, and what its converter makes another family.
NOT_IN_GGUF = (
    *("llama-yarn-not-truncated", "llama3", "qwen3-moe-mixed", "smollm3-listed"),
    *("gemma3-otherwise", "granite4"),
    *("deepseek3", "glm4-moe-lite"),
)
# Whose tensors have another order there.
REORDERED = ("qwen35", "qwen35-moe")
# Of which tensors of a directory are several there.
APART = ("qwen3-next",)


@pytest.mark.parametrize("name", MODELS)
def test_a_directory_has_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    family = GoldenFamily.of(name)
    source = HfDirectorySource(family.write_hf(tmp_path))
    logits = forward(source.spec, stored_weights(source), PROMPT)[np.array(POSITIONS) - 1]
    np.testing.assert_allclose(logits, family.logits, rtol=1e-4, atol=1e-4 * np.abs(family.logits).max())


@pytest.mark.parametrize("name", [n for n in MODELS if n not in (*NOT_IN_GGUF, *REORDERED, *APART)])
def test_a_gguf_file_is_the_same_model(tmp_path: Path, name: str) -> None:
    family = GoldenFamily.of(name)
    directory = HfDirectorySource(family.write_hf(tmp_path))
    file = GgufSource(family.write_gguf(tmp_path / "model.gguf"))
    assert [type(each.rope and each.rope.scaling) for each in file.spec.rotations] == [
        type(each.rope and each.rope.scaling) for each in directory.spec.rotations
    ]
    assert values_of(file.spec) == pytest.approx(values_of(directory.spec))  # those of GGUF are f32
    expected = stored_weights(directory)
    for weight, values in stored_weights(file).items():
        np.testing.assert_array_equal(values, expected.pop(weight), err_msg=weight)
    assert not expected


def test_a_gguf_file_may_have_value_heads_in_their_order(tmp_path: Path) -> None:
    """With tensors that the directory has in one: those of q, k and v, and of the gates."""
    family = GoldenFamily.of("qwen3-next")
    directory = HfDirectorySource(family.write_hf(tmp_path))
    file = GgufSource(family.write_gguf(tmp_path / "model.gguf"))
    assert directory.spec.delta_net is not None
    assert file.spec.delta_net == replace(directory.spec.delta_net, fused_inputs=False)
    others = (changed(spec, {"fused_inputs": False}) for spec in (file.spec, directory.spec))
    assert values_of(next(others)) == pytest.approx(values_of(next(others)))
    expected = stored_weights(directory)
    for weight, values in stored_weights(file).items():
        np.testing.assert_allclose(values, expected.pop(weight), rtol=1e-6, err_msg=weight)
    assert not expected


@pytest.mark.parametrize("name", REORDERED)
def test_value_heads_of_a_gguf_file_share_key_heads_in_turn(tmp_path: Path, name: str) -> None:
    family = GoldenFamily.of(name)
    source = GgufSource(family.write_gguf(tmp_path / "model.gguf"))
    assert source.spec.delta_net is not None
    assert source.spec.delta_net.tiled
    logits = forward(source.spec, stored_weights(source), PROMPT)[np.array(POSITIONS) - 1]
    np.testing.assert_allclose(logits, family.logits, rtol=1e-4, atol=1e-4 * np.abs(family.logits).max())


def test_a_directory_may_have_an_interval_and_a_draft_layer_of_its_own_embedding(tmp_path: Path) -> None:
    """As Qwen3.5's, whose `layer_types` may be missing and whose positions have sections for images.

    A draft layer with an embedding of its own is not built.
    """
    family = GoldenFamily.of("qwen35")
    listed = HfDirectorySource(family.write_hf(tmp_path / "listed"))
    del family.config["layer_types"]
    family.config.update(full_attention_interval=2, attn_output_gate=True, mtp_num_hidden_layers=1)
    family.config["rope_parameters"].update(mrope_section=[1, 2, 1], mrope_interleaved=True)
    family.add_draft_layer()
    family.tensors["mtp.embed_tokens.weight"] = np.zeros((83, 48), np.float32)
    given = HfDirectorySource(family.write_hf(tmp_path / "given"))
    assert replace(given.spec, name=listed.spec.name) == listed.spec


def test_value_heads_must_divide_among_key_heads(tmp_path: Path) -> None:
    family = GoldenFamily.of("qwen35")
    family.config["linear_num_key_heads"] = 3
    with pytest.raises(BuildError, match="4 value heads do not divide among 3 key heads"):
        HfDirectorySource(family.write_hf(tmp_path))


def test_draft_layers_of_a_gguf_file_are_left_out(tmp_path: Path) -> None:
    """The last block is taken for one here."""
    family = GoldenFamily.of("qwen35")
    source = GgufSource(family.write_gguf(tmp_path / "model.gguf", {"nextn_predict_layers": 1}))
    assert len(source.spec.layers) == 2
    assert source.spec.delta_net is not None
    assert source.spec.pools["state"] == (0,)
    assert not any(name.startswith("blk.2.") for name in stored_weights(source))
    assert source.left_out is not None
    assert source.left_out.startswith("layers of a draft model (")
    assert GgufSource(family.write_gguf(tmp_path / "without.gguf")).left_out is None


def test_a_draft_layer_of_a_gguf_file_with_an_embedding_of_its_own_is_left_out(tmp_path: Path) -> None:
    family = GoldenFamily.of("qwen35")
    count = family.config["num_hidden_layers"]
    keys = {"block_count": count + 1, "nextn_predict_layers": 1}
    family.add_draft_layer()
    family.tensors["mtp.embed_tokens.weight"] = np.zeros((83, 48), np.float32)
    source = GgufSource(family.write_gguf(tmp_path / "model.gguf", keys))
    assert source.spec.draft is None
    assert source.left_out is not None
    assert source.left_out.endswith(" MB), with an embedding or a head of their own")


def values_of(spec: ModelSpec) -> dict[str, object]:
    """Every field of it, of its blocks and of their scalings, by its place."""
    return dict(_items("", asdict(replace(spec, name="", architecture=spec.architecture.replace("_", "")))))


def _items(place: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping | tuple):
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, part in parts:
            yield from _items(f"{place}.{name}", part)
    else:
        yield place, value
