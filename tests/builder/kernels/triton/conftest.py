"""Programs of Triton kernels on both emulated chips."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from shortfin_apps.llm.builder.lowering.lowering import LoweringContext
from shortfin_apps.llm.builder.target import resolve_target
from shortfin_apps.llm.builder.weights.parameters import WeightTypes
from shortfin_apps.llm.model.spec import BuildOptions, ModelSpec
from tests.builder.kernels.triton.launched import Body, Inputs, Launched, program_text
from tests.hip import CHIPS, EmulatedGpus

Launch = Callable[[Inputs, Body, LoweringContext], Launched]


@pytest.fixture(params=CHIPS)
def chip(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture
def launch(chip: str, emulated_gpus: EmulatedGpus) -> Iterator[Launch]:
    """Compiles and loads a program; what its kernels do wrong fails the test."""
    device = emulated_gpus.open(chip)

    def make(inputs: Inputs, body: Body, context: LoweringContext) -> Launched:
        tables = next(iter(context.rotaries.values())).declarations()
        text = program_text(inputs, body, lambda: [*tables, *context.rendered.texts.values()])
        return Launched(device, resolve_target(f"hip:{chip}"), text, inputs)

    with emulated_gpus.watch(chip):
        yield make
    device.close()


def context_of(spec: ModelSpec, chip: str, options: BuildOptions) -> LoweringContext:
    target = resolve_target(f"hip:{chip}")
    return LoweringContext(spec, options, target, WeightTypes(spec, options, target))
