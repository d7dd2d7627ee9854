"""Draws, adjusted rows and terms of log-probabilities of CPU kernels."""

from __future__ import annotations

import pytest

from shortfin_apps.llm.builder.lowering.cpu.sampling import VectorSampling
from shortfin_apps.llm.builder.lowering.cpu.top_k import VectorTopK
from shortfin_apps.llm.builder.lowering.lowering import LoweringContext
from shortfin_apps.llm.components.runtime.device import Device
from tests.builder.adjust_tests import AdjustTests
from tests.builder.compiled_model import HOST
from tests.builder.draw_tests import Draws, DrawTests
from tests.builder.kernels.triton.launched import Body, Inputs, Launched, program_text
from tests.builder.logprob_tests import LogprobTests


@pytest.fixture
def draws(device: Device) -> Draws:
    def launch(inputs: Inputs, body: Body, context: LoweringContext) -> Launched:
        text = program_text(inputs, body, lambda: [*context.rendered.texts.values()])
        return Launched(device, HOST, text, inputs)

    return Draws("cpu", VectorSampling, VectorTopK, launch)


class TestDraws(DrawTests):
    """On this CPU."""


class TestAdjusting(AdjustTests):
    """On this CPU."""


class TestLogprobs(LogprobTests):
    """On this CPU."""
