"""`best_of` on a compiled model: the answers that `n` returns, ranked, over shared pages."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from tests.integration.served_tiny import serving

pytestmark = pytest.mark.slow

PROMPT = "the sea and the wind and the stars above the old harbour wall " * 3


async def test_the_best_of_n_answers_are_returned(tiny_artifact: Artifact) -> None:
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 6, "temperature": 1, "seed": 3}
    body["ignore_eos"] = True
    async with serving(tiny_artifact) as (client, _):
        every = (await client.post("/v1/completions", json=body | {"n": 4, "logprobs": 0})).json()
        best = (await client.post("/v1/completions", json=body | {"n": 2, "best_of": 4})).json()
    ranked = sorted(every["choices"], key=lambda choice: -fmean(choice["logprobs"]["token_logprobs"]))
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in ranked[:2]]
    assert best["usage"]["completion_tokens"] == 4 * 6


async def test_the_prompt_is_computed_once(tiny_artifact: Artifact) -> None:
    sampling = {"n": 3, "best_of": 4, "max_new_tokens": 2, "temperature": 1, "ignore_eos": True}
    async with serving(tiny_artifact) as (client, _):
        answer = (await client.post("/generate", json={"text": PROMPT, "sampling_params": sampling})).json()
    [prompt] = answer["responses"]
    shared = [each["meta_info"]["cached_tokens"] > 0 for each in prompt["responses"]]
    assert sum(shared) >= 2, "only one of the four was first"
