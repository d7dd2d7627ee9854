"""The text models of directories that also have a vision or audio tower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shortfin_apps.llm.builder.sources.first_look import look_at_directory
from shortfin_apps.llm.builder.sources.hf_directory import HfDirectorySource
from shortfin_apps.llm.builder.sources.hf_text_part import text_config, text_name
from shortfin_apps.llm.contract.errors import BuildError
from tests.builder.golden_families import GoldenFamily, stored_weights
from tests.builder.model_files import write_hf

# Golden family -> `model_type` of the whole, and the prefixes of its tensors of text and of others as
# transformers 5.24 writes them.
WHOLES = {
    "gemma3": ("gemma3", "language_model.", "language_model.", "vision_tower."),
    "ministral3": ("mistral3", "language_model.", "language_model.", "multi_modal_projector."),
    "ministral3-tied": ("mistral3", "language_model.", "language_model.", "vision_tower."),
    "gemma4": ("gemma4", "model.language_model.", "", "model.embed_vision."),
    "gemma4-e": ("gemma4", "model.language_model.", "", "model.audio_tower."),
    "gemma4-moe": ("gemma4", "model.language_model.", "", "model.vision_tower."),
    "gemma4-unified": ("gemma4_unified", "model.language_model.", "", "model.vision_embedder."),
    "qwen35": ("qwen3_5", "model.language_model.", "", "model.visual."),
    "qwen35-moe": ("qwen3_5_moe", "model.language_model.", "", "model.visual."),
    "deepseek3": ("kimi_vl", "language_model.", "language_model.", "vision_tower."),
}


def whole(name: str, fields: dict[str, Any] | None = None) -> GoldenFamily:
    """The golden family as the text model of one with 3 tensors of other parts: of 36, 20 and 5 bytes."""
    kind, text, head, others = WHOLES[name]
    family = GoldenFamily.of(name)
    config = {"model_type": kind, "text_config": family.config, "vision_config": {"odd": 1}, **(fields or {})}
    tensors = {_renamed(each, text, head): values for each, values in family.tensors.items()}
    for index, values in enumerate((np.zeros((3, 3)), np.zeros(5))):
        tensors[f"{others}layers.{index}.weight"] = values.astype(np.float32)
    tensors[f"{others}table"] = np.zeros(5, np.int8)
    return GoldenFamily(config, tensors, family.logits)


def _renamed(name: str, text: str, head: str) -> str:
    if name.startswith("lm_head."):
        return f"{head}{name}"
    return f"{text}{name}" if text == "language_model." else f"{text}{name.removeprefix('model.')}"


@pytest.mark.parametrize("name", WHOLES)
def test_the_text_model_of_a_whole_is_the_same(tmp_path: Path, name: str) -> None:
    alone = HfDirectorySource(GoldenFamily.of(name).write_hf(tmp_path / "alone"), name="x")
    part = HfDirectorySource(whole(name).write_hf(tmp_path / "whole"), name="x")
    assert part.spec == alone.spec
    expected = stored_weights(alone)
    for weight, values in stored_weights(part).items():
        np.testing.assert_array_equal(values, expected.pop(weight), err_msg=weight)
    assert not expected
    assert alone.left_out is None
    assert part.left_out == "vision and audio parts (3 tensors, 0.0 MB), as only text is supported"


@pytest.mark.parametrize("tied", [None, True, False])
def test_a_part_is_tied_if_it_has_no_head(tmp_path: Path, tied: bool | None) -> None:
    """Transformers writes both `true` and `false` for one model: of the whole, and of its text model."""
    for name, expected in (("ministral3", False), ("ministral3-tied", True)):
        family = whole(name, {"tie_word_embeddings": tied})
        family.config["text_config"]["tie_word_embeddings"] = not tied
        assert HfDirectorySource(family.write_hf(tmp_path / name)).spec.tie_word_embeddings is expected


def test_fields_of_the_whole_apply_to_the_text_model() -> None:
    raw = {
        "model_type": "gemma3",
        "text_config": {"dtype": "float32"},
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8"},
        "eos_token_id": [1, 106],
        "image_token_id": 5,
    }
    assert text_config("x", raw) == {
        "model_type": "gemma3_text",
        "dtype": "float32",
        "quantization_config": {"quant_method": "fp8"},
        "eos_token_id": [1, 106],
    }


def test_a_published_gemma_3_4b_has_few_fields(tmp_path: Path) -> None:
    family = whole("gemma3")
    # The published one has these sizes, with which it would be large here.
    tiny = ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "query_pre_attn_scalar")
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "rope_scaling", "sliding_window", *tiny)
    given = family.config["text_config"] | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    family.config["text_config"] = {name: given[name] for name in kept}
    part = HfDirectorySource(family.write_hf(tmp_path / "few"), name="x")
    whole_spec = HfDirectorySource(whole("gemma3").write_hf(tmp_path / "all"), name="x").spec
    assert part.spec.layers == whole_spec.layers
    assert part.spec.max_position_embeddings == 131072


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llava", "vision_config": {}, "text_config": {}}, "vision or audio tower .`llava`"),
        ({"model_type": "gemma3", "vision_config": {}}, "a vision or audio tower .`gemma3`"),
        (
            {"model_type": "gemma3", "text_config": {"model_type": "llama"}},
            "`gemma3` with a text model `llama`",
        ),
        ({"model_type": None, "text_config": {}, "audio_config": {}}, "a vision or audio tower .`None`"),
    ],
)
def test_others_are_refused_by_name(tmp_path: Path, config: dict[str, object], message: str) -> None:
    directory = write_hf(tmp_path, config=config)
    for read in (HfDirectorySource, look_at_directory):
        with pytest.raises(BuildError, match=message):
            read(directory)


@pytest.mark.parametrize(
    ("name", "alone"),
    [
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.multi_modal_projector.linear_1.weight", None),
        ("vision_tower.ln_pre.weight", None),
        ("model.embed_audio.embedding_projection.weight", None),
        ("mtp.fc.weight", "mtp.fc.weight"),
    ],
)
def test_names_lose_the_prefix_of_the_text_model(name: str, alone: str | None) -> None:
    assert text_name(name) == alone
