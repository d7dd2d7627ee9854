"""The server as a process on an emulated AMD GPU gives the tokens of the server on the CPU, and ends well."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from emulated_gpu.control import Report, read_report
from emulated_gpu.library import EmulatedGpu
from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.client import LlmClient
from shortfin_apps.llm.model.spec import BuildOptions
from tests.conftest import BuildTiny
from tests.hip import CHIPS, describe
from tests.integration.generation import Continuation, assert_same
from tests.integration.server_process import PATIENCE_S, Service, start, stop
from tests.runtimes import needs_shortfin

pytestmark = [needs_shortfin, pytest.mark.emulated, pytest.mark.timeout(600)]

TOLERANCE = 0.1  # of logits: both devices round to bf16, at other places
NUM_PROMPTS = 30
MAX_TOKENS = 3
LONGEST = 40  # tokens of a prompt
ANSWER_TIMEOUT_S = 300.0  # the emulated GPU is slow on a busy machine
MODES = ("default", "extend-attention")


@dataclass(frozen=True)
class Served:
    service: Service
    report: Path


@pytest.fixture(scope="module")
def prompts(tiny_artifact: Artifact) -> list[list[int]]:
    assert tiny_artifact.vocab_size is not None
    random = np.random.default_rng(11)
    lengths = random.integers(1, LONGEST, NUM_PROMPTS)
    return [random.integers(0, tiny_artifact.vocab_size, n).tolist() for n in lengths]


@pytest.fixture(scope="module")
def on_cpu(tiny_artifact: Artifact, prompts: list[list[int]]) -> list[Continuation]:
    running = start(tiny_artifact, "--device", "cpu")
    try:
        answers = asyncio.run(ask_all(running, prompts, return_logprob=True, top_logprobs_num=2))
    finally:
        assert stop(running) == 0
    return [Continuation(tuple(answer["output_ids"]), _gaps(answer)) for answer in answers]


def _gaps(answer: dict[str, Any]) -> tuple[float, ...]:
    tops = answer["meta_info"]["output_top_logprobs"]
    return tuple(best[0] - second[0] for best, second in tops)


async def ask_all(service: Service, prompts: list[list[int]], **more: Any) -> list[dict[str, Any]]:
    """The greedy answers to the prompts, each in a request of its own, all at once."""
    params = {"max_completion_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=service.url, timeout=ANSWER_TIMEOUT_S) as client:
        bodies = [{"input_ids": prompt, "sampling_params": params, **more} for prompt in prompts]
        answers = await asyncio.gather(*(client.post("/generate", json=body) for body in bodies))
    assert [answer.status_code for answer in answers] == [200] * len(prompts)
    return [answer.json()["responses"][0]["responses"][0] for answer in answers]


@contextmanager
def served(artifact: Artifact, chip: str, folder: Path, *flags: str) -> Iterator[Served]:
    """A server on a GPU; when it is stopped it must exit well, and its kernels have done nothing wrong."""
    report = folder / "report.jsonl"
    gpu = EmulatedGpu(chip, report=report)
    # test_hip_self_test.py has the self-test, which takes long on an emulated GPU
    running = start(artifact, "--self-test", "off", *flags, environment=gpu.environment())
    try:
        yield Served(running, report)
    finally:
        assert stop(running) == 0
    summary = read_report(report)
    assert isinstance(summary, Report), "the process did not exit in order"
    assert sum(kernel.launches for kernel in summary.kernels.values()) > NUM_PROMPTS
    assert not summary.misuses
    assert not summary.findings, "\n".join(map(describe, summary.findings))


def build_small(build_tiny: BuildTiny, chip: str) -> Artifact:
    return build_tiny(BuildOptions(device=f"hip:{chip}", prefill_batch_sizes=(2,), decode_batch_sizes=(8,)))


@pytest.fixture(scope="module", params=[(chip, mode) for chip in CHIPS for mode in MODES], ids="-".join)
def server(
    request: pytest.FixtureRequest, build_tiny: BuildTiny, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    chip, mode = request.param
    artifact = build_small(build_tiny, chip)
    folder = tmp_path_factory.mktemp("report")
    with served(artifact, chip, folder, "--device", "hip", "--batch-mode", mode) as running:
        yield running.service


async def test_tokens_are_those_of_the_cpu(
    server: Service, prompts: list[list[int]], on_cpu: list[Continuation]
) -> None:
    answers = await ask_all(server, prompts)
    pairs = zip(on_cpu, answers, strict=True)
    compared = [assert_same(expected, answer["output_ids"], TOLERANCE) for expected, answer in pairs]
    assert sum(compared) > NUM_PROMPTS * MAX_TOKENS / 2, "near ties ended almost every comparison"


async def test_a_client_that_leaves_frees_its_pages(server: Service, prompts: list[list[int]]) -> None:
    async with LlmClient(server.url) as client:
        stream = client.stream(prompts[0], max_tokens=900, temperature=0, ignore_eos=True)
        await anext(stream)
        await stream.aclose()
        async with asyncio.timeout(PATIENCE_S):
            while server.metric("vllm:num_requests_running"):
                await asyncio.sleep(0)
    assert server.metric("shortfin_llm:pages_leased") == 0


def test_a_drain_finishes_what_runs(build_tiny: BuildTiny, tmp_path: Path) -> None:
    """By the name of upstream's flag, which is said to mean another driver elsewhere."""
    chip = CHIPS[0]
    artifact = build_small(build_tiny, chip)
    flags = ("--device", "amdgpu", "--shutdown-timeout", str(PATIENCE_S))
    with served(artifact, chip, tmp_path, *flags) as running:
        params = {"max_completion_tokens": 6, "ignore_eos": True}
        body = {"text": "hello", "sampling_params": params, "stream": True}
        url = f"{running.service.url}/generate"
        with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as response:
            lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
            next(lines)
            running.service.process.send_signal(signal.SIGTERM)
            *_, last, done = lines
        assert done == "[DONE]"
        assert json.loads(last)["meta_info"]["finish_reason"]["type"] == "length"
        assert running.service.process.wait(PATIENCE_S) == 0
        running.service.log.seek(0)
        assert "`amdgpu` means `hip` here" in running.service.log.read()
