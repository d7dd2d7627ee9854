"""One artefact for CPUs and AMD GPUs gives the same tokens on each, and `verify` runs what fits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from shortfin_apps.llm.artifact.artifact import Artifact, fitting_host
from shortfin_apps.llm.builder.builder import build
from shortfin_apps.llm.builder.progress import QuietProgress
from shortfin_apps.llm.components.runtime.open import host_of, hosts_at_hand
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from shortfin_apps.llm.tools.verify.run import verify
from tests.hip import CHIPS, EmulatedGpus
from tests.integration.generation import Continuation, assert_all_same, generate, open_engine

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(300)]

TOLERANCE = 0.1  # as in test_hip_tokens.py
MAX_TOKENS = 8
LENGTHS = (1, 15, 16, 17, 130)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("several") / "artefact"
    options = BuildOptions.for_devices(
        f"hip:{','.join(CHIPS)},cpu", prefill_batch_sizes=(2,), decode_batch_sizes=(4,), extend_sizes=(64,)
    )
    build("random:tiny", out, options, QuietProgress())
    return out


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = np.random.default_rng(46)
    return [random.integers(0, 250, n).tolist() for n in LENGTHS]


def tokens(artifact: Artifact, device: str, prompts: Sequence[Sequence[int]]) -> list[Continuation]:
    with open_engine(artifact, EngineSettings(device=device)) as engine:
        return generate(engine, prompts, MAX_TOKENS)


def test_the_same_tokens_from_one_artefact(
    folder: Path, prompts: Sequence[Sequence[int]], emulated_gpus: EmulatedGpus
) -> None:
    expected = tokens(Artifact.open(folder, host=host_of("cpu")), "cpu", prompts)
    for chip in CHIPS:
        with emulated_gpus.watch(chip):
            artifact = Artifact.open(folder, host=fitting_host(folder, hosts_at_hand))
            assert artifact.vmfb.name == f"model.{chip}.vmfb"
            assert_all_same(expected, tokens(artifact, "hip", prompts), TOLERANCE, MAX_TOKENS)


@pytest.mark.parametrize(
    ("chip", "tested"), [("gfx1100", ["gfx1100", "gfx1100", "host"]), ("gfx1201", ["host"])]
)
def test_verify_runs_the_programs_that_fit(
    folder: Path, emulated_gpus: EmulatedGpus, chip: str, tested: list[str]
) -> None:
    with emulated_gpus.watch(chip):
        found = verify(folder)
    assert found.is_right
    assert [result.program for result in found.results] == tested  # one for each of the two GPUs
