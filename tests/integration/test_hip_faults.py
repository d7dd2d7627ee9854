"""Fault schedules on emulated GPUs: requests are right or end with an error, nothing hangs or leaks.

`pytest -m emulated tests/integration/test_hip_faults.py --fault-seed 17` repeats one of them, and
`--fault-schedules 200` runs more of them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pytest

from emulated_gpu.library import EmulatedGpu
from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from tests.conftest import BuildTiny
from tests.hip import CHIPS
from tests.integration.generation import generate, open_engine
from tests.integration.hip_fault_schedule import ENDED, MAX_TOKENS, Schedule
from tests.runtimes import needs_shortfin

pytestmark = [needs_shortfin, pytest.mark.emulated, pytest.mark.timeout(3600)]

NUM_SCHEDULES, PER_PROCESS = 20, 10
LENGTHS = (1, 7, 16, 21, 40)
PROCESS_TIMEOUT_S = 600
MAX_CRASHED_SHARE = 0.1  # IREE 3.9 may free an error twice when a GPU fails, which ends the process


@pytest.fixture(scope="module")
def workload(
    tiny_artifact: Artifact, build_tiny: BuildTiny, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A file for `hip_fault_schedule`."""
    random = np.random.default_rng(3)
    assert tiny_artifact.vocab_size is not None
    prompts = [random.integers(0, tiny_artifact.vocab_size, n).tolist() for n in LENGTHS]
    with open_engine(tiny_artifact, EngineSettings(runtime="iree")) as engine:
        expected = [generate(engine, [prompt], MAX_TOKENS)[0] for prompt in prompts]
    artefacts = {chip: str(_build(build_tiny, chip).vmfb.parent) for chip in CHIPS}
    path = tmp_path_factory.mktemp("workload") / "workload.json"
    path.write_text(
        json.dumps({"artefacts": artefacts, "prompts": prompts, "expected": list(map(asdict, expected))})
    )
    return path


def _build(build_tiny: BuildTiny, chip: str) -> Artifact:
    return build_tiny(
        BuildOptions(
            device=f"hip:{chip}", prefill_batch_sizes=(2,), decode_batch_sizes=(4,), decode_loop_sizes=(4,)
        )
    )


@dataclass(frozen=True)
class Results:
    """What came of the schedules, by seed; `crashed` are those that ended their process by a signal."""

    ended: dict[int, str]
    crashed: dict[int, str]


def run_schedules(workload: Path, seeds: Sequence[int]) -> Results:
    """Runs them in as few processes as their faults allow; raises AssertionError if one goes wrong."""
    results = Results({}, {})
    left = list(seeds)
    while left:
        output, status = _run_process(workload, left[:PER_PROCESS])
        lines = output.splitlines()
        began = [int(line.partition(":")[0]) for line in lines if not line.startswith(ENDED)]
        outcomes = [line.removeprefix(ENDED).strip() for line in lines if line.startswith(ENDED)]
        results.ended.update(zip(began, outcomes, strict=False))
        assert began, "no schedule has begun"
        if status < 0:
            assert any(Schedule(seed).is_final for seed in began), f"signal {-status} without a failure"
            results.crashed[began[-1]] = signal.Signals(-status).name
        left = left[len(began) :]
    return results


def _run_process(workload: Path, seeds: Sequence[int]) -> tuple[str, int]:
    """What it printed, and its status; raises AssertionError if that is one of a failed schedule."""
    command = [sys.executable, "-m", "tests.integration.hip_fault_schedule", str(workload), *map(str, seeds)]
    environment = {**os.environ, **EmulatedGpu().environment()}
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PROCESS_TIMEOUT_S, check=False
    )
    assert ended.returncode <= 0, f"{ended.stdout}\n{ended.stderr}\nto repeat it: --fault-seed N"
    return ended.stdout, ended.returncode


@pytest.fixture
def num_schedules(request: pytest.FixtureRequest) -> int:
    chosen: int | None = request.config.getoption("--fault-schedules")
    return chosen or NUM_SCHEDULES


def test_requests_are_right_or_end_with_an_error(
    workload: Path, fault_seed: int | None, num_schedules: int
) -> None:
    if fault_seed is not None:
        print(run_schedules(workload, [fault_seed]))
        return
    jobs = [
        range(first, min(first + PER_PROCESS, num_schedules))
        for first in range(0, num_schedules, PER_PROCESS)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda seeds: run_schedules(workload, seeds), jobs))
    ended = [seed for each in results for seed in each.ended]
    crashed = {seed: name for each in results for seed, name in each.crashed.items()}
    assert set(ended) | crashed.keys() == set(range(num_schedules))
    print(f"{len(ended)} schedules, of which {len(crashed)} ended their process: {crashed}")
    assert len(crashed) <= MAX_CRASHED_SHARE * num_schedules, crashed
