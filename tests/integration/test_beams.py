"""Compares beam search on a compiled model with one over a numpy forward pass, in f32 to avoid near ties."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
import numpy as np
import numpy.typing as npt
import pytest

from shortfin_apps.llm.artifact.artifact import Artifact
from shortfin_apps.llm.builder.sources.random_tiny import RandomTinySource
from shortfin_apps.llm.builder.weights.write import plan_weights
from shortfin_apps.llm.components.batching.mode import BatchSettings
from shortfin_apps.llm.components.kvcache import PrefixCache
from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.components.request.sampling_params import SamplingParams
from shortfin_apps.llm.model.reference.forward import forward
from shortfin_apps.llm.model.spec import BuildOptions
from shortfin_apps.llm.serving.api.app import create_app
from shortfin_apps.llm.serving.api.service import Service
from shortfin_apps.llm.serving.engine_settings import EngineSettings
from shortfin_apps.llm.serving.frontend.async_engine import AsyncEngine
from shortfin_apps.llm.serving.frontend.beam_search import BeamSearch, Hypothesis
from shortfin_apps.llm.serving.frontend.metrics import ServerMetrics
from shortfin_apps.llm.serving.server import config_sources
from shortfin_apps.llm.serving.server.model_loading import load_model
from tests.conftest import BuildTiny
from tests.integration.generation import open_engine
from tests.serving.frontend.beam_reference import Logits, reference_search

pytestmark = pytest.mark.slow

OPTIONS = BuildOptions(
    weights="f32",
    kv="f32",
    prefill_batch_sizes=(1, 4),
    decode_batch_sizes=(1, 8),
    chunk_sizes=(),
    context_length=128,
)
MAX_TOKENS = 8
LENGTHS = (1, 15, 16, 33)
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def artifact(build_tiny: BuildTiny) -> Artifact:
    return build_tiny(OPTIONS)


@pytest.fixture(scope="module")
def logits() -> Logits:
    source = RandomTinySource()
    weights = {w.name: w.load(source).astype(np.float32) for w in plan_weights(source.spec)}

    @functools.cache
    def last(context: tuple[int, ...]) -> npt.NDArray[np.float32]:
        row: npt.NDArray[np.float32] = forward(source.spec, weights, np.array(context))[-1]
        return row

    return lambda context: last(tuple(context))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = np.random.default_rng(11)
    return [random.integers(32, 127, n).tolist() for n in LENGTHS]


@asynccontextmanager
async def serving(artifact: Artifact, options: EngineSettings) -> AsyncIterator[AsyncEngine]:
    with open_engine(artifact, options) as made:
        engine = AsyncEngine(made, max_requests=16)
        engine.start()
        try:
            yield engine
            await engine.drain(PATIENCE_S)
        finally:
            await engine.close()
        assert engine.stats().pages.leased == 0


async def search(engine: AsyncEngine, name: str, prompt: Sequence[int], num_beams: int) -> list[Hypothesis]:
    params = SamplingParams(max_tokens=MAX_TOKENS)
    call = GenerateCall(request_id=name, prompt_token_ids=tuple(prompt), params=params)
    beams = BeamSearch(engine, call, num_beams, frozenset())
    await beams.start()
    while not beams.done:
        await beams.step()
    return beams.hypotheses


@pytest.mark.parametrize("prefix_cache", ["none", "trie"])
@pytest.mark.parametrize("chunk_tokens", [16, 48])
async def test_beams_match_the_reference(
    artifact: Artifact,
    logits: Logits,
    prompts: list[list[int]],
    prefix_cache: PrefixCache,
    chunk_tokens: int,
) -> None:
    """1, 2 and 4 beams of every prompt, all concurrently."""
    options = EngineSettings(
        prefix_cache=prefix_cache, batching=BatchSettings(batch_mode="default", chunk_tokens=chunk_tokens)
    )
    cases = [(prompt, num_beams) for prompt in prompts for num_beams in (1, 2, 4)]
    async with serving(artifact, options) as engine:
        searches = [search(engine, str(i), prompt, beams) for i, (prompt, beams) in enumerate(cases)]
        found = await asyncio.gather(*searches)
    for (prompt, num_beams), hypotheses in zip(cases, found, strict=True):
        expected = reference_search(logits, prompt, num_beams, MAX_TOKENS)
        assert [h.token_ids for h in hypotheses] == [r.token_ids for r in expected]
        assert [h.score for h in hypotheses] == pytest.approx([r.score for r in expected], abs=1e-3)


async def test_beams_over_http(artifact: Artifact, logits: Logits) -> None:
    config = config_sources.load({"artifact": artifact.vmfb.parent})
    metrics = ServerMetrics("m")
    loaded = load_model(artifact, config, metrics)
    loaded.engine.start()
    service = Service(name="m", metrics=metrics, config={})
    service.serve(loaded.model)
    prompt = list(b"Once upon")
    sampling = [{"max_tokens": 6, "num_beams": count} for count in (2, 4)]
    bodies = [{"input_ids": prompt, "sampling_params": params} for params in sampling]
    transport = httpx.ASGITransport(app=create_app(service, root_path=""))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answers = [(await client.post("/generate", json=body)).json() for body in bodies]
    finally:
        await loaded.engine.close()
    eos = loaded.model.generator.tokenizer.eos_token_ids
    for answer, num_beams in zip(answers, (2, 4), strict=True):
        expected = reference_search(logits, prompt, num_beams, 6, ends=eos)
        got = [tuple(response["output_ids"]) for response in answer["responses"][0]["responses"]]
        assert got == [ranked.token_ids for ranked in expected]
