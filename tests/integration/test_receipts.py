"""Receipts made under load, with preemptions, in one mode, and replayed alone in the other: real servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.client import LlmClient
from shortfin_apps.llm.model.spec import BuildOptions, WeightType
from shortfin_apps.llm.serving.receipts.receipt import Receipt
from shortfin_apps.llm.tools.replay.compare import Outcome
from shortfin_apps.llm.tools.replay.in_process import EXTEND, SCHEDULES, opened, replay
from shortfin_apps.llm.tools.replay.over_http import replay_on
from tests.conftest import BuildTiny
from tests.integration.served_tiny import serving as serving_here
from tests.integration.server_process import Service, llm, start, stop

pytestmark = pytest.mark.slow

MODES = ("default", EXTEND)
NUM_RECEIPTS, NUM_KEPT = 60, 12
PAGES = 12  # of 16 tokens: a request takes up to 7


@contextlib.contextmanager
def serving(artifact: Artifact, *flags: str) -> Iterator[Service]:
    service = start(artifact, *flags)
    try:
        yield service
    finally:
        assert stop(service) == 0


def bodies() -> list[dict[str, Any]]:
    """Greedy and sampled requests, some with grammars, half of them with a common prefix."""
    random, prefix = Random(3), list(range(40, 72))
    made = []
    for number in range(NUM_RECEIPTS):
        own = [random.randrange(32, 127) for _ in range(random.randint(1, 24))]
        sampling: dict[str, Any] = {"max_tokens": random.randint(1, 40)}
        sampling |= {"temperature": random.choice([0.7, 1.2])} if number % 2 else {}
        sampling |= {"regex": "([a-z]{1,9} )*"} if number % 6 == 0 else {"ignore_eos": True}
        prompt = prefix + own if number % 4 < 2 else own
        made.append({"input_ids": prompt, "sampling_params": sampling, "receipt": True})
    return made


async def made_by(url: str) -> list[Receipt]:
    async with LlmClient(url) as client:
        answers = await asyncio.gather(*map(client.generate_native, bodies()))
    return list(map(receipt_in, answers))


def receipt_in(answer: Any) -> Receipt:
    return Receipt.parse(answer["responses"][0]["responses"][0]["meta_info"]["receipt"])


async def asked(url: str, receipts: list[Receipt], concurrency: int) -> Outcome:
    async with LlmClient(url) as client:
        return await replay_on(client, receipts, concurrency)


@pytest.mark.parametrize("mode", MODES)
def test_receipts_under_load_are_the_same_alone_in_the_other_mode(tiny_artifact: Artifact, mode: str) -> None:
    [other] = set(MODES) - {mode}
    with serving(tiny_artifact, "--batch-mode", mode, "--pages", str(PAGES)) as service:
        receipts = asyncio.run(made_by(service.url))
        assert service.metric("vllm:num_preemptions_total") > 0
        assert asyncio.run(asked(service.url, receipts, 16)).differences == {}
    with opened(tiny_artifact.vmfb.parent, receipts) as subject:
        outcome = replay(subject, SCHEDULES["alone" if other == "default" else EXTEND])
    assert (outcome.differences, outcome.num_same) == ({}, NUM_RECEIPTS)
    with serving(tiny_artifact, "--batch-mode", other) as service:
        assert asyncio.run(asked(service.url, receipts, 1)).differences == {}


def test_api_processes_answer_with_the_same_receipts(tiny_artifact: Artifact, tmp_path: Path) -> None:
    """By the commands that a user runs, with a key of openssl's."""
    key, public, file = (tmp_path / name for name in ("key.pem", "public.pem", "receipts.jsonl"))
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
    subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", public], check=True)
    with serving(tiny_artifact, "--api-processes", "2", "--receipts", "--receipt-key", str(key)) as service:
        receipts = asyncio.run(made_by(service.url))
        file.write_text("".join(json.dumps(each.to_json()) + "\n" for each in receipts))
        arguments = ["replay", str(file), "--url", service.url, "--public-key", str(public)]
        run = subprocess.run(llm(*arguments, "--concurrency", "8"), capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert f"{NUM_RECEIPTS} of {NUM_RECEIPTS}" in run.stdout


def outcomes_of(artifact: Artifact) -> dict[str, int]:
    """How many of NUM_KEPT receipts of a server with few pages are the same under each schedule."""

    async def made() -> list[Receipt]:
        async with serving_here(artifact, pages=PAGES) as (client, _):
            posts = (client.post("/generate", json=body) for body in bodies()[:NUM_KEPT])
            answers = [response.json() for response in await asyncio.gather(*posts)]
        return [receipt_in(answer) for answer in answers]

    receipts = asyncio.run(made())
    with opened(artifact.vmfb.parent, receipts) as subject:
        return {name: replay(subject, schedule).num_same for name, schedule in SCHEDULES.items()}


@pytest.mark.parametrize("weights", ["f32", "f16", "q8_0", "q4", "int8"])
def test_other_weights_give_the_same_bits_too(build_tiny: BuildTiny, weights: WeightType) -> None:
    same = outcomes_of(build_tiny(BuildOptions(weights=weights)))
    assert same == dict.fromkeys(SCHEDULES, NUM_KEPT)
