"""The form for GPUs over long histories, on this CPU (long_context.py has the checks)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shortfin_apps.llm.components.runtime.iree_device import open_local_task
from tests.builder.compiled_model import GENERIC, CompiledModel
from tests.integration.long_context import CHECKS, Check, LongRows, build_long


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CompiledModel]:
    device = open_local_task()
    yield build_long(device, tmp_path_factory.mktemp("long"), GENERIC)
    device.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_an_entry_agrees_with_the_reference(model: CompiledModel, check: Check) -> None:
    check(LongRows(model))
