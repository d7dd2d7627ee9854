"""Tenants behind a gateway: HTTP, keys and the real engine, over a fake device."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import httpx
import pytest

from shortfin_apps.llm.components.request.messages import GenerateCall
from shortfin_apps.llm.serving.api.app import create_app
from shortfin_apps.llm.serving.api.sampling import SamplingDefaults
from shortfin_apps.llm.serving.api.service import ServedModel, Service
from shortfin_apps.llm.serving.frontend.async_engine import AsyncEngine
from shortfin_apps.llm.serving.frontend.delta_stream import DeltaStream
from shortfin_apps.llm.serving.frontend.metrics import ServerMetrics
from shortfin_apps.llm.serving.frontend.text_generation import TextGenerator
from shortfin_apps.llm.serving.http.auth import KeyRing
from tests.components.device_gate import Gate
from tests.components.engine_fixture import make_rig
from tests.components.fake_device import fake_config
from tests.serving.api.harness import BASE_URL, MODEL, TOKENIZER

pytestmark = pytest.mark.slow

NUM_PROMPTS = 60  # of each tenant
MAX_TOKENS = 8
# No two have a page in common, so that whatever is found in the cache is another tenant's.
PROMPTS = [[1 + n // 30, n % 30, *range(n % 7 + 4)] for n in range(NUM_PROMPTS)]
SENDERS = {
    "alice": {"Authorization": "Bearer gate", "X-Tenant": "alice"},
    "bob": {"Authorization": "Bearer gate", "X-Tenant": "bob"},
    # Calls directly and says that it is bob, whose weight is larger, and whose pages it would find.
    "mallory": {"Authorization": "Bearer direct", "X-Tenant": "bob"},
}
WEIGHTS = {"alice": 1.0, "bob": 3.0, "mallory": 1.0}


class CountingEngine(AsyncEngine):
    """Opens the gate once all requests are there, so that the tenants compete from the first to the last."""

    def __init__(self, gate: Gate, wanted: int, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._gate = gate
        self._missing = wanted

    def admit(self, call: GenerateCall) -> DeltaStream:
        stream = super().admit(call)
        self._missing -= 1
        if self._missing == 0:
            self._gate.open()
        return stream


def app_over(engine: AsyncEngine, max_requests: int) -> Any:
    metrics = ServerMetrics(MODEL)
    generator = TextGenerator(TOKENIZER, engine, max_seq_len=64, max_requests=max_requests, metrics=metrics)
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
    return create_app(service, keys=KeyRing(["direct"], gateway_keys=["gate"]))


async def test_tenants_share_by_weight_and_share_no_page() -> None:
    """Tokens of tenants that all wait are within 10 % of their weights; a forged header changes nothing."""
    wanted = NUM_PROMPTS * len(SENDERS)
    rig = make_rig(
        fake_config(pages=4096),
        max_running=2,
        scheduling={"tenant_weights": {"alice": 1.0, "bob": 3.0}},
    )
    engine = CountingEngine(Gate(rig), wanted, rig.engine, max_requests=wanted)
    engine.start()
    ended: list[tuple[str, int]] = []  # in order: whose, and its tokens

    transport = httpx.ASGITransport(app=app_over(engine, wanted))
    async with httpx.AsyncClient(transport=transport, base_url=BASE_URL) as client:

        async def ask(sender: str, prompt: list[int]) -> int:
            """Returns the tokens of the prompt that were found in the cache."""
            body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True}
            response = await client.post("/v1/completions", json=body, headers=SENDERS[sender])
            usage = response.json()["usage"]
            assert usage["completion_tokens"] == MAX_TOKENS
            ended.append((sender, usage["prompt_tokens"] + MAX_TOKENS))
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        found = await asyncio.gather(*(ask(name, prompt) for prompt in PROMPTS for name in SENDERS))
        assert set(found) == {0}
        assert await asyncio.gather(*(ask(name, PROMPTS[3]) for name in SENDERS)) == [8, 8, 8]
    await engine.close()
    assert rig.all_pages_back()

    check_shares(ended)


def check_shares(ended: list[tuple[str, int]]) -> None:
    """Up to the last request of bob, which gets three fifths and so ends first, all tenants wait."""
    last = max(index for index, (name, _) in enumerate(ended[: NUM_PROMPTS * len(SENDERS)]) if name == "bob")
    tokens: Counter[str] = Counter()
    for name, count in ended[: last + 1]:
        tokens[name] += count
    for name, weight in WEIGHTS.items():
        fair = weight / sum(WEIGHTS.values())
        share = tokens[name] / tokens.total()
        assert abs(share - fair) < 0.1 * fair, f"{name} got {share:.3f} of the tokens, not {fair}"
