"""Gated delta nets and a shared expert in a model compiled for this CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shortfin_apps.llm.components.runtime.device import Device
from shortfin_apps.llm.model.reference.forward import forward
from tests.builder.compiled_model import HYBRID, CompiledModel
from tests.builder.hybrid_model import (
    BORDERS,
    MIXED,
    ODD,
    OPTIONS,
    TILED,
    TOKENS,
    check_blocks_without_pages,
    check_chunks,
    check_decodes,
    check_followers,
    check_rows_are_independent,
    in_chunks,
)

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model(device: Device, tmp_path_factory: pytest.TempPathFactory) -> CompiledModel:
    return CompiledModel.build(MIXED, OPTIONS, device, tmp_path_factory.mktemp("hybrid"))


@pytest.mark.parametrize("borders", BORDERS)
def test_chunks_change_no_bit_of_a_state(model: CompiledModel, borders: list[int]) -> None:
    check_chunks(model, borders, TOLERANCE)


def test_decodes_go_on_from_a_prefill(model: CompiledModel) -> None:
    check_decodes(model, TOLERANCE)


def test_rows_of_one_request_follow_each_other(model: CompiledModel) -> None:
    check_followers(model)


def test_a_row_does_not_depend_on_the_other(model: CompiledModel) -> None:
    check_rows_are_independent(model)


def test_a_block_without_a_page_of_its_own_is_left_out(
    model: CompiledModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_blocks_without_pages(model, monkeypatch)


def test_states_of_odd_sizes_lie_beside_keys_and_values_in_bytes(
    device: Device, tmp_path_factory: pytest.TempPathFactory
) -> None:
    options = replace(OPTIONS, kv="q8_0")
    model = CompiledModel.build(ODD, options, device, tmp_path_factory.mktemp("odd"))
    check_chunks(model, [12, 29], 5e-3)


def test_value_heads_may_share_key_heads_in_turn(
    device: Device, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = CompiledModel.build(TILED, OPTIONS, device, tmp_path_factory.mktemp("tiled"))
    expected = forward(TILED, model.weights, TOKENS)[-1]
    np.testing.assert_allclose(in_chunks(model, [29]), expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert not np.allclose(expected, forward(HYBRID, model.weights, TOKENS)[-1], rtol=1e-2)
