"""Rows of the embedding, from every layout that holds it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from shortfin_apps.llm.builder.graph.emitter import Emitter, Tensor
from shortfin_apps.llm.builder.lowering.linalg.embedding import embedding
from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.builder.weights.chosen_layout import weight_layout
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec, WeightType
from shortfin_apps.llm.model.weight_blocks import BlockType
from tests.builder.compiled_kernels import (
    NAMES,
    NARROW,
    NO_TILES,
    SMMLA,
    ConstantWeights,
    function,
    load,
)
from tests.builder.compiled_model import HOST, TINY
from tests.builder.random_blocks import BLOCK_TYPES
from tests.builder.specs import changed
from tests.matrices import slow_but

UNEVEN = changed(
    TINY, {"hidden_size": 96, "features": 112, "vocab_size": 48}
)  # half a panel, and half a tile
# Sizes that fill AMX tiles.
WHOLE = changed(TINY, {"hidden_size": 96, "features": 160, "vocab_size": 64})
NAME = "token_embd.weight"


@pytest.mark.parametrize("spec", [UNEVEN, WHOLE], ids=["uneven", "whole"])
@pytest.mark.parametrize("target", [HOST, NO_TILES, NARROW, SMMLA], ids=lambda target: NAMES[target.features])
@pytest.mark.parametrize("kind", slow_but(["bf16", "q4"], get_args(WeightType)))
def test_a_row_is_its_tokens_and_the_last_for_ids_past_it(
    kind: WeightType, target: Target, spec: ModelSpec, tmp_path: Path
) -> None:
    check_rows(BuildOptions(weights=kind), target, spec, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in BLOCK_TYPES if kind.bits == 8], ids=str)
@pytest.mark.parametrize(
    ("target", "spec"),
    [(HOST, WHOLE), (NO_TILES, UNEVEN), (NARROW, UNEVEN), (SMMLA, WHOLE)],
    ids=["host", "no-tiles", "narrow", "smmla"],
)
def test_a_row_has_the_terms_of_its_blocks(
    kind: BlockType, target: Target, spec: ModelSpec, tmp_path: Path
) -> None:
    options = BuildOptions(weights="q8_0", block_types=((NAME, kind),))
    check_rows(options, target, replace(spec, hidden_size=512), tmp_path)


def check_rows(options: BuildOptions, target: Target, spec: ModelSpec, tmp_path: Path) -> None:
    matrix = np.random.default_rng(0).standard_normal((spec.vocab_size, spec.hidden_size)).astype(np.float32)
    weights = ConstantWeights({NAME: matrix}, {NAME: weight_layout(NAME, spec, options, target)})

    def run(e: Emitter, x: Tensor) -> list[Tensor]:
        ids = "  %id = arith.fptosi %a : f32 to i64\n  linalg.yield %id : i64"
        tokens = e.elementwise("t", ("t", x.shape, "i64"), [(x, "t")], ids)
        return [embedding(e, spec, weights, tokens, NAME)]

    text = "\n".join(["module @rows {", *weights.declarations(), function("run", {"x": ("?",)}, run), "}"])
    tokens = np.array([0, 1, 17, 40, spec.vocab_size - 1, spec.vocab_size + 5], np.float32)
    rows = load(text, tmp_path).run(tokens).to_host()
    expected = weights.values[NAME][np.minimum(tokens, spec.vocab_size - 1).astype(int)]
    np.testing.assert_array_equal(rows, expected)
