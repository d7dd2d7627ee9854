from __future__ import annotations

from tests.serving.api.harness import Harness


async def test_health_follows_the_engine(harness: Harness) -> None:
    assert (await harness.client.get("/health")).status_code == 200
    harness.engine.healthy = False
    assert (await harness.client.get("/health")).status_code == 503


async def test_a_server_is_ready_until_it_drains(harness: Harness) -> None:
    assert (await harness.client.get("/ready")).status_code == 200
    await harness.engine.drain(0)
    assert (await harness.client.get("/ready")).status_code == 503


async def test_routes_while_the_model_loads() -> None:
    harness = Harness(loaded=False)
    assert (await harness.client.get("/ready")).status_code == 503
    assert (await harness.client.get("/health")).status_code == 200
    assert (await harness.client.get("/metrics")).status_code == 200
    assert (await harness.client.get("/server_info")).json()["model"] is None
    response = await harness.client.get("/v1/models")
    assert (response.status_code, response.json()["error"]["type"]) == (503, "service_unavailable_error")
