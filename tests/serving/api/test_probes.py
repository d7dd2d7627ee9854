from __future__ import annotations

import asyncio
import logging

import pytest

from shortfin_apps.llm.contract.errors import InvocationError
from shortfin_apps.llm.serving.http.auth import KeyRing
from tests.serving.api.harness import MODEL, TOKENIZER, Harness
from tests.serving.api.scripted_engine import failing, forever


async def test_live_answers_from_the_first_moment_on() -> None:
    harness = Harness(loaded=False, keys=KeyRing(["k"]))
    response = await harness.client.get("/live")
    assert (response.status_code, response.json()) == (200, {"status": "live"})


async def test_health_generate_generates_one_token(harness: Harness) -> None:
    response = await harness.client.get("/health_generate")
    assert (response.status_code, response.json()) == (200, {"status": "healthy"})
    (call,) = harness.engine.calls
    assert (len(call.prompt_token_ids), call.params.max_tokens) == (1, 1)


async def test_health_generate_is_503_when_no_token_comes_in_time() -> None:
    harness = Harness(forever(TOKENIZER, "the "))
    harness.engine.gate.clear()
    harness.service.probe_timeout_s = 0.0
    assert (await harness.client.get("/health_generate")).status_code == 503
    assert not harness.engine.live, "the probe is aborted"


async def test_health_generate_is_503_when_the_device_fails_and_while_the_model_loads() -> None:
    for harness in (Harness(failing(InvocationError("x"))), Harness(loaded=False)):
        response = await harness.client.get("/health_generate")
        assert (response.status_code, response.json()) == (503, {"status": "not healthy"})


async def test_a_full_queue_is_no_fault_of_the_engine() -> None:
    harness = Harness()
    harness.engine.capacity = 0
    assert (await harness.client.get("/health_generate")).status_code == 200
    harness.engine.healthy = False
    assert (await harness.client.get("/health_generate")).status_code == 503


async def test_a_probe_counts_for_the_tenant_whose_key_it_has() -> None:
    harness = Harness(keys=KeyRing(["k"]))
    assert (await harness.client.get("/health_generate")).status_code == 401
    await harness.client.get("/health_generate", headers={"Authorization": "Bearer k"})
    assert harness.engine.calls[0].terms.tenant


async def test_load_has_the_fields_of_vllm_and_sglang(harness: Harness) -> None:
    load = (await harness.client.get("/load")).json()
    assert load == {
        "server_load": 3,
        "dp_rank": 0,
        "num_reqs": 3,
        "num_running_reqs": 2,
        "num_waiting_reqs": 1,
        "num_tokens": 4 * 16,
        "num_queue_tokens": 0,
    }
    assert (await harness.client.get("/get_load")).json() == [load]


async def test_get_model_info_has_the_fields_of_sglang(harness: Harness) -> None:
    info = (await harness.client.get("/get_model_info")).json()
    assert (info["model_path"], info["tokenizer_path"], info["is_generation"]) == (MODEL, MODEL, True)


@pytest.mark.parametrize("path", ["/live", "/load", "/get_load", "/get_model_info", "/health_generate"])
async def test_probes_are_logged_at_debug(
    harness: Harness, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "shortfin_apps.llm.serving.http.access_log")
    await harness.client.get(path)
    assert [record.levelno for record in caplog.records if record.message == "request"] == [logging.DEBUG]


async def test_probes_in_a_row_do_not_wait_for_each_other(harness: Harness) -> None:
    answers = await asyncio.gather(*(harness.client.get("/health_generate") for _ in range(5)))
    assert [answer.status_code for answer in answers] == [200] * 5
