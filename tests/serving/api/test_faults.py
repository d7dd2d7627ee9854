"""Device failures as clients see them, with the real engine over a fake device that can fail."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import httpx
import pytest
import pytest_asyncio

from shortfin_apps.llm.serving.api.app import create_app
from shortfin_apps.llm.serving.api.sampling import SamplingDefaults
from shortfin_apps.llm.serving.api.service import ServedModel, Service
from shortfin_apps.llm.serving.frontend.async_engine import AsyncEngine
from shortfin_apps.llm.serving.frontend.metrics import ServerMetrics
from shortfin_apps.llm.serving.frontend.text_generation import TextGenerator
from tests.components.engine_fixture import Rig, make_rig
from tests.components.fake_device import VOCAB
from tests.serving.api.harness import BASE_URL, MODEL, TOKENIZER

BODY = {"input_ids": [1, 2, 3], "sampling_params": {"max_completion_tokens": 5}}
OPENAI_BODY = {"prompt": [1, 2, 3], "max_tokens": 5}


@dataclass
class Faulty:
    rig: Rig
    client: httpx.AsyncClient

    async def works(self) -> bool:
        answer = await self.client.post("/generate", json=BODY)
        healthy = await self.client.get("/health")
        return (answer.status_code, healthy.status_code) == (200, 200)


@pytest_asyncio.fixture
async def faulty() -> AsyncIterator[Faulty]:
    rig = make_rig()
    engine = AsyncEngine(rig.engine, max_requests=8)
    engine.start()
    metrics = ServerMetrics(MODEL)
    assert TOKENIZER.vocab_size >= VOCAB
    generator = TextGenerator(TOKENIZER, engine, max_seq_len=64, max_requests=8, metrics=metrics)
    defaults = SamplingDefaults(temperature=0.0)
    service = Service(name=MODEL, metrics=metrics, config={})
    service.serve(
        ServedModel(
            generator=generator,
            native_defaults=defaults,
            openai_defaults=defaults,
            exported_top_k=4,
            info={},
        )
    )
    transport = httpx.ASGITransport(app=create_app(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url=BASE_URL) as client:
        yield Faulty(rig, client)
    await engine.close()
    assert rig.all_pages_back()


def spoil_logits(rig: Rig) -> None:
    rig.program.faults.spoil = lambda row: True


def break_device(rig: Rig) -> None:
    def fail(entry: str) -> None:
        raise RuntimeError("the device is on fire")

    rig.program.faults.before = fail


def mend(rig: Rig) -> None:
    rig.program.faults.spoil = lambda row: False
    rig.program.faults.before = lambda entry: None


@pytest.mark.parametrize("fault", [spoil_logits, break_device])
async def test_a_failed_invocation_is_500_and_the_next_request_works(
    fault: Callable[[Rig], None], faulty: Faulty
) -> None:
    fault(faulty.rig)
    native = await faulty.client.post("/generate", json=BODY)
    assert (native.status_code, native.json()["code"]) == (500, "INVOCATION_FAILED")
    openai = await faulty.client.post("/v1/completions", json=OPENAI_BODY)
    assert openai.status_code == 500
    assert (openai.json()["error"]["type"], openai.json()["error"]["param"]) == ("server_error", None)
    mend(faulty.rig)
    assert await faulty.works()


@pytest.mark.parametrize("fault", [spoil_logits, break_device])
@pytest.mark.parametrize(("path", "body"), [("/generate", BODY), ("/v1/completions", OPENAI_BODY)])
async def test_a_stream_that_fails_before_its_first_token_is_500(
    fault: Callable[[Rig], None], path: str, body: dict[str, object], faulty: Faulty
) -> None:
    fault(faulty.rig)
    streamed = await faulty.client.post(path, json={**body, "stream": True})
    assert streamed.status_code == 500
    assert "INVOCATION_FAILED" in str(streamed.json())
    mend(faulty.rig)
    assert await faulty.works()
