"""Draft layers in models compiled for GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.model.spec import ModelSpec
from tests.builder.compiled_model import CompiledModel
from tests.builder.drafting_model import (
    DRAFTING,
    EAGLE,
    OF_LATENTS,
    PLAIN,
    SHARING_HEAD,
    check_drafts,
    check_unknown,
)
from tests.builder.hybrid_model import OPTIONS
from tests.hip import EmulatedGpus
from tests.runtimes import needs_shortfin

pytest.importorskip("triton", reason="Triton is not installed")

pytestmark = [needs_shortfin, pytest.mark.emulated, pytest.mark.timeout(600)]

TOLERANCE = 5e-3  # of f32, in another order of sums
CASES: list[tuple[str, ModelSpec]] = [
    *(("gfx942", DRAFTING), ("gfx1100", PLAIN), ("gfx942", OF_LATENTS)),
    *(("gfx942", EAGLE), ("gfx1100", SHARING_HEAD)),
]


@pytest.fixture(scope="module", params=CASES, ids=["gfx942", "gfx1100", "latent", "eagle", "sharing"])
def model(
    request: pytest.FixtureRequest, emulated_gpus: EmulatedGpus, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CompiledModel]:
    chip, spec = request.param
    target = resolve_target(f"hip:{chip}")
    options = replace(OPTIONS, device=target.device, decode_loop_sizes=())
    with emulated_gpus.watch(chip):
        device, folder = emulated_gpus.open(chip), tmp_path_factory.mktemp("drafting")
        yield CompiledModel.build(spec, options, device, folder, target)
        device.close()


def test_drafts_are_those_of_the_reference(model: CompiledModel) -> None:
    check_drafts(model, TOLERANCE)


def test_a_hidden_state_that_nobody_knows_is_zero(model: CompiledModel) -> None:
    check_unknown(model, TOLERANCE)
