"""The form for GPUs over long histories, on this CPU and on AMD GPUs (long_context.py has the checks)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.components.runtime.iree_device import open_local_task
from tests.builder.compiled_model import GENERIC, CompiledModel
from tests.hip import EmulatedGpus, on_chips
from tests.integration.long_context import CHECKS, Check, build_long, long_rows


@pytest.fixture(scope="module", params=["generic", *on_chips("hip")])
def name(request: pytest.FixtureRequest) -> str:
    """Of a model, as `EmulatedGpus.watch_model` takes it."""
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
def model(
    name: str, emulated_gpus: EmulatedGpus, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CompiledModel]:
    chip = name.partition("-")[2]
    device = emulated_gpus.open(chip) if chip else open_local_task()
    target = resolve_target(f"hip:{chip}") if chip else GENERIC
    yield build_long(device, tmp_path_factory.mktemp("long"), target)
    device.close()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_an_entry_agrees_with_the_reference(
    name: str, model: CompiledModel, emulated_gpus: EmulatedGpus, check: Check
) -> None:
    with emulated_gpus.watch_model(name):
        check(long_rows(model))
