"""What every family defines; `tests/builder/sources/test_families.py` compares their models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shortfin_apps.llm.model.attention import Attention
from shortfin_apps.llm.model.families import FAMILIES, OF_ARCHITECTURE, OF_MODEL_TYPE
from shortfin_apps.llm.model.families.family import Config, Family
from shortfin_apps.llm.model.feed_forward import MLP, MoE
from shortfin_apps.llm.model.spec import tensor_shapes
from tests.builder.specs import windows_of

SIZES: dict[str, Any] = {
    "vocab_size": 80,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_defaults_of_a_directory_and_of_a_gguf_file_give_a_model(family: Family) -> None:
    for config in (
        Config(**{**family.defaults, **SIZES}),
        Config(**{**SIZES, **family.gguf.defaults, "in_gguf": True}),
    ):
        spec = family.spec("x", config)
        assert spec.architecture == family.architecture
        assert len(spec.layers) == SIZES["num_hidden_layers"]
        assert tensor_shapes(spec)["token_embd.weight"] == (SIZES["vocab_size"], SIZES["hidden_size"])


def test_names_are_unambiguous() -> None:
    assert len(OF_MODEL_TYPE) == len(FAMILIES)
    named = [family.architecture for family in FAMILIES if family.in_gguf]
    assert len(OF_ARCHITECTURE) == len(named)
    titles = [title for family in FAMILIES for title in family.title.split(", ")]
    assert len(set(titles)) == len(titles)


def test_the_table_of_models_lists_every_family() -> None:
    table = Path(__file__).parents[3].joinpath("docs", "models.md").read_text(encoding="utf-8")
    rows = [row.split("|") for row in table.splitlines() if row.startswith("|")]
    listed = {cells[2].strip() for cells in rows}, {cells[3].strip() for cells in rows}
    assert {f"`{name}`" for name in OF_MODEL_TYPE} <= listed[0]
    assert {f"`{name}`" for name in OF_ARCHITECTURE} <= listed[1]


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, [8] * 7),
        ({"max_window_layers": 5}, [None] * 5 + [8] * 2),
        ({"sliding_window_pattern": 3, "max_window_layers": 5}, [8, 8, None, 8, 8, None, 8]),
        ({"layer_types": ["full_attention"] * 6 + ["sliding_attention"]}, [None] * 6 + [8]),
        ({"use_sliding_window": False}, [None] * 7),
        ({"sliding_window": None}, [None] * 7),
    ],
)
def test_windows(fields: dict[str, Any], windows: list[int | None]) -> None:
    config = Config(**{**SIZES, "sliding_window": 8, **fields})
    assert windows_of(OF_MODEL_TYPE["llama"].spec("x", config)) == windows


def test_some_layers_of_a_mixture_are_dense() -> None:
    fields: dict[str, Any] = {
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    }
    spec = OF_MODEL_TYPE["qwen3_moe"].spec("x", Config(**SIZES, **fields))
    kinds = [type(feed_forward) for _, feed_forward in spec.layers]
    assert kinds == [MLP, MoE, MLP, MLP, MLP, MoE, MLP]


@pytest.mark.parametrize(("fields", "attending"), [({}, (3,)), ({"full_attention_interval": 2}, (1, 3, 5))])
def test_the_last_layer_of_each_interval_attends(fields: dict[str, Any], attending: tuple[int, ...]) -> None:
    spec = OF_MODEL_TYPE["qwen3_5_text"].spec("x", Config(**SIZES, **fields))
    assert tuple(n for n, layer in enumerate(spec.layers) if isinstance(layer[0], Attention)) == attending


@pytest.mark.parametrize(("family", "layers"), [("gemma2", 46), ("gemma3_text", 62)])
def test_llama_cpps_largest_gemmas_have_another_scale_of_scores(family: str, layers: int) -> None:
    """Scores are divided by the square root of the width per head, not of `head_dim`."""
    sizes = SIZES | {"num_hidden_layers": layers, "head_dim": 32, "in_gguf": True}
    large = OF_MODEL_TYPE[family].spec("x", Config(**sizes)).attention
    small = OF_MODEL_TYPE[family].spec("x", Config(**{**sizes, "num_hidden_layers": 2})).attention
    assert large.score_scale == pytest.approx((32 / 16) ** 0.5)
    assert small.score_scale == 1.0


def test_a_divided_stream_has_the_norms_of_the_whole_one() -> None:
    residual, eps = 0.22, 0.1
    scalars = {"residual_multiplier": residual, "embedding_multiplier": 12.0, "logits_scaling": 8.0}
    spec = OF_MODEL_TYPE["granite"].spec("x", Config(**{**SIZES, "rms_norm_eps": eps, **scalars}))
    x = np.random.default_rng(0).standard_normal(64)
    divided = x / residual
    normed = divided / np.sqrt(np.mean(divided**2) + spec.rms_norm_eps)
    np.testing.assert_allclose(normed, x / np.sqrt(np.mean(x * x) + eps))
    assert (spec.embedding_scale, spec.logit_scale) == (12.0 / residual, 1 / 8.0)
