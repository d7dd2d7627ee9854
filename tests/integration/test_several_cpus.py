"""An artefact for several kinds of CPU gives the tokens of one for each, whichever this CPU is taken for."""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.contract.host_cpu import HostCpu, this_host
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from tests.conftest import TINY_OPTIONS, BuildTiny
from tests.host_cpus import V3, V4
from tests.integration.generation import Continuation, assert_all_same, generate, open_engine
from tests.integration.served_tiny import MODEL, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the kinds of CPU are of x86-64"),
]

TOLERANCE = 0.02  # as in test_same_tokens.py
MAX_TOKENS = 24
LENGTHS = (1, 15, 17, 64, 130)
SEVERAL = replace(TINY_OPTIONS, device="cpu:x86-64-v3,x86-64-v4,host")
HOSTS = {"x86-64-v3": V3, "x86-64-v4": V4, "host": this_host()}


@pytest.fixture(scope="module")
def prompts(tiny_artifact: Artifact) -> list[list[int]]:
    assert tiny_artifact.vocab_size is not None
    random = np.random.default_rng(11)
    return [random.integers(0, tiny_artifact.vocab_size, n).tolist() for n in LENGTHS]


def tokens(artifact: Artifact, prompts: Sequence[Sequence[int]]) -> list[Continuation]:
    with open_engine(artifact, EngineSettings(runtime="iree")) as engine:
        return generate(engine, prompts, MAX_TOKENS)


def taken_for(build_tiny: BuildTiny, cpu: str) -> Artifact:
    """The artefact for several, opened on a host like `cpu`, which this CPU must be able to stand for."""
    if missing := _lacks(HOSTS[cpu]):
        pytest.skip(f"this CPU has no {', '.join(missing)}")
    return Artifact.open(build_tiny(SEVERAL).vmfb.parent, host=HOSTS[cpu])


def _lacks(host: HostCpu) -> list[str]:
    return sorted(host.features - this_host().features)


@pytest.mark.parametrize("cpu", HOSTS)
def test_the_same_tokens_as_alone(
    build_tiny: BuildTiny, prompts: list[list[int]], tiny_artifact: Artifact, cpu: str
) -> None:
    artifact = taken_for(build_tiny, cpu)
    assert artifact.manifest is not None
    assert artifact.manifest.program.target.name == cpu
    alone = build_tiny(replace(TINY_OPTIONS, device="cpu" if cpu == "host" else f"cpu:{cpu}"))
    got = tokens(artifact, prompts)
    assert got == tokens(alone, prompts)
    assert artifact.config == alone.config
    assert_all_same(tokens(tiny_artifact, prompts), got, TOLERANCE, MAX_TOKENS)


async def test_a_server_says_which_program_it_takes(
    build_tiny: BuildTiny, caplog: pytest.LogCaptureFixture
) -> None:
    artifact = taken_for(build_tiny, "x86-64-v3")
    with caplog.at_level(logging.INFO):
        async with serving(artifact, verify="hash") as (client, _):
            body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
            answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert "the program for x86-64-v3 suits this CPU best; " in caplog.text
    assert "x86-64-v4 needs avx512bw, avx512cd" in caplog.text
