"""Gated delta nets and a shared expert in a model compiled for GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from shortfin_apps.llm.builder.target import resolve_target
from tests.builder.compiled_model import CompiledModel
from tests.builder.hybrid_model import (
    MIXED,
    OPTIONS,
    check_blocks_without_pages,
    check_chunks,
    check_decodes,
    check_followers,
    check_rows_are_independent,
)
from tests.hip import EmulatedGpus
from tests.runtimes import needs_shortfin

pytest.importorskip("triton", reason="Triton is not installed")

pytestmark = [needs_shortfin, pytest.mark.emulated, pytest.mark.timeout(600)]

TOLERANCE = 5e-3  # of f32, in another order of sums; a last bit may decide to which of two bytes K is rounded
CHIP = "gfx942"  # tests/builder/kernels/triton has both for each kernel


@pytest.fixture(scope="module")
def model(emulated_gpus: EmulatedGpus, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CompiledModel]:
    """Keeps K and V in bytes, and states in f32."""
    options = replace(OPTIONS, kv="q8_0", decode_loop_sizes=())
    target = resolve_target(f"hip:{CHIP}")
    with emulated_gpus.watch(CHIP):
        device, folder = emulated_gpus.open(CHIP), tmp_path_factory.mktemp("hybrid")
        yield CompiledModel.build(MIXED, options, device, folder, target)
        device.close()


def test_chunks_change_no_bit_of_a_state(model: CompiledModel) -> None:
    check_chunks(model, [1, 2, 4, 20, 29], TOLERANCE)


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
