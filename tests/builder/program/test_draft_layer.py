"""Compiled draft layers against the numpy reference: keys and values that all entries store, and drafts."""

from __future__ import annotations

import pytest

from shortfin_apps.llm.builder.target import Target
from shortfin_apps.llm.components.runtime.device import Device
from shortfin_apps.llm.contract.abi import HIDDEN_PER_SLOT, hidden_row
from shortfin_apps.llm.model.spec import ModelSpec
from tests.builder.compiled_model import GENERIC, HOST, CompiledModel
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

TOLERANCE = 2e-4


@pytest.fixture(
    scope="module",
    params=["plain", "hybrid", "latent", "eagle", "sharing", "generic", "generic latent", "generic eagle"],
)
def model(
    request: pytest.FixtureRequest, device: Device, tmp_path_factory: pytest.TempPathFactory
) -> CompiledModel:
    models: dict[str, tuple[ModelSpec, Target]] = {
        "plain": (PLAIN, HOST),
        "latent": (OF_LATENTS, HOST),
        "generic latent": (OF_LATENTS, GENERIC),
        "hybrid": (DRAFTING, HOST),
        "generic": (PLAIN, GENERIC),
        "eagle": (EAGLE, HOST),
        "sharing": (SHARING_HEAD, HOST),
        "generic eagle": (SHARING_HEAD, GENERIC),
    }
    spec, target = models[request.param]
    return CompiledModel.build(spec, OPTIONS, device, tmp_path_factory.mktemp(request.param), target)


def test_drafts_are_those_of_the_reference(model: CompiledModel) -> None:
    check_drafts(model, TOLERANCE)


def test_a_hidden_state_that_nobody_knows_is_zero(model: CompiledModel) -> None:
    check_unknown(model, TOLERANCE)


def test_rows_of_the_table_do_not_meet_in_a_draft() -> None:
    """What the first round reads is not overwritten by as many tokens as may be drafted."""
    rows = [hidden_row(3, position) for position in range(HIDDEN_PER_SLOT)]
    assert len(set(rows)) == HIDDEN_PER_SLOT
    assert {each // HIDDEN_PER_SLOT for each in (rows[0] - 1, rows[-1] - 1)} == {3}
