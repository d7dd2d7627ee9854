"""Terms of log-probabilities of Triton kernels."""

from __future__ import annotations

import pytest

from tests.builder.draw_tests import Draws
from tests.builder.kernels.triton.conftest import Launch
from tests.builder.logprob_tests import LogprobTests
from tests.runtimes import needs_shortfin

pytest.importorskip("triton", reason="Triton is not installed")
from shortfin_apps.llm.builder.lowering.triton.sampling import TritonSampling
from shortfin_apps.llm.builder.lowering.triton.top_k import TritonTopK

pytestmark = [needs_shortfin, pytest.mark.emulated, pytest.mark.timeout(300)]


@pytest.fixture
def draws(chip: str, launch: Launch) -> Draws:
    return Draws(f"hip:{chip}", TritonSampling, TritonTopK, launch)


class TestLogprobs(LogprobTests):
    """On AMD GPUs."""
