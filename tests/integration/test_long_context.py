"""The form for GPUs over long histories, on this CPU and on AMD GPUs (long_context.py has the checks)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.components.runtime.iree_local import open_local_task
from tests.builder.compiled_model import GENERIC, CompiledModel
from tests.hip import CHIPS, EmulatedGpus
from tests.integration.long_context import CHECKS, Check, build_long, long_rows
from tests.runtimes import needs_shortfin

pytestmark = pytest.mark.slow

ON_CHIPS = [pytest.param(chip, marks=[needs_shortfin, pytest.mark.emulated]) for chip in CHIPS]


@pytest.fixture(scope="module", params=[pytest.param(None, id="generic"), *ON_CHIPS])
def chip(request: pytest.FixtureRequest) -> str | None:
    """None for this CPU."""
    chosen: str | None = request.param
    return chosen


@pytest.fixture(scope="module")
def model(
    chip: str | None, emulated_gpus: EmulatedGpus, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CompiledModel]:
    device = emulated_gpus.open(chip) if chip else open_local_task()
    target = resolve_target(f"hip:{chip}") if chip else GENERIC
    yield build_long(device, tmp_path_factory.mktemp("long"), target)
    device.close()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_an_entry_agrees_with_the_reference(
    chip: str | None, model: CompiledModel, emulated_gpus: EmulatedGpus, check: Check
) -> None:
    with emulated_gpus.watch(chip) if chip else nullcontext():
        check(long_rows(model))
